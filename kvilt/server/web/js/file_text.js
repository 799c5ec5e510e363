// The text of a file that a user gives: text and Markdown as they are, HTML without its tags, PDFs read by the server.

import { Told } from './advice.js';

const MOST_BYTES = 2 * 1024 * 1024;
const MOST_PDF_BYTES = 5 * 1024 * 1024; // what the server takes, less what base64 adds
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
export async function fileDocument(file, api) {
  if (await isPdf(file)) return { title: file.name, text: await pdfText(file, api) };
  if (file.size > MOST_BYTES) throw new Told(`${file.name} is larger than 2 MB.`);
  const raw = await file.text();
  if (raw.includes('\0')) throw new Told(`${file.name} is no text. Text, Markdown, HTML and PDF can be read.`);
  const text = /\.x?html?$/i.test(file.name) || file.type === 'text/html' ? htmlText(raw) : raw.trim();
  if (!text) throw new Told(`${file.name} is empty.`);
  return { title: file.name, text };
}

async function isPdf(file) {
  return (await file.slice(0, 5).text()) === '%PDF-';
}

/** What a PDF says: the server reads it, and keeps nothing. */
async function pdfText(file, api) {
  if (file.size > MOST_PDF_BYTES) throw new Told(`${file.name} is larger than 5 MB.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  let raw = '';
  for (let at = 0; at < bytes.length; at += 0x8000) raw += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  try {
    return (await api.call('POST', 'v1/documents/text', { data: btoa(raw) })).text;
  } catch (error) {
    if (error.code !== 'pdf_off' && error.code !== 'pdf_unreadable') throw error;
    throw new Told(`${file.name}: ${error.message}.`);
  }
}
