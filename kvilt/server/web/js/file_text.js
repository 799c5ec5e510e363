// The text of a file that a user gives: text and Markdown as they are, HTML without its tags.

import { Told } from './advice.js';

const MOST_BYTES = 2 * 1024 * 1024;
const NAMED = { amp: '&', lt: '<', gt: '>', quot: '"', apos: "'", nbsp: ' ', mdash: '—', ndash: '–', hellip: '…', copy: '©' };

/** A page's text. No parser of the browser is used: markup from a file never becomes a document. */
export function htmlText(html) {
  return html
    .replace(/<!--[\s\S]*?-->|<(script|style|noscript|template)\b[\s\S]*?<\/\1\s*>/gi, ' ')
    .replace(/<(br|\/p|\/div|\/li|\/tr|\/h[1-6]|\/section|\/article)\b[^>]*>/gi, '\n')
    .replace(/<[^>]*>/g, '')
    .replace(/&(#x[0-9a-f]{1,6}|#\d{1,7}|\w{2,8});/gi, (whole, name) => entity(name) ?? whole)
    .replace(/[ \t]+/g, ' ').replace(/ *\n */g, '\n').replace(/\n{3,}/g, '\n\n').trim();
}

function entity(name) {
  if (name[0] !== '#') return NAMED[name.toLowerCase()];
  const code = /^#x/i.test(name) ? Number.parseInt(name.slice(2), 16) : Number.parseInt(name.slice(1), 10);
  return code > 0 && code < 0x110000 ? String.fromCodePoint(code) : null;
}

/** `{title, text}` of a file; an Error says why it is no document. */
export async function fileDocument(file) {
  if (file.size > MOST_BYTES) throw new Told(`${file.name} is larger than 2 MB.`);
  const raw = await file.text();
  if (raw.includes('\0') || raw.slice(0, 5) === '%PDF-') throw new Told(`${file.name} is no text. Text, Markdown and HTML can be read.`);
  const text = /\.x?html?$/i.test(file.name) || file.type === 'text/html' ? htmlText(raw) : raw.trim();
  if (!text) throw new Told(`${file.name} is empty.`);
  return { title: file.name, text };
}
