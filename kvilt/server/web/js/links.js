// Links in answers: only to the web and to mail addresses, opened in another tab after the page has shown where they go.

import { byId, el } from './dom.js';

const BARE = /https?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]}]/y;

/** The address of a link, or null where it is none that may be followed. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return ['http:', 'https:', 'mailto:'].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** A link as an element; null for an address that may not be followed. */
export function link(address, children) {
  const href = safeAddress(address);
  if (href === null) return null;
  return el('a', { href, rel: 'noopener noreferrer nofollow', target: '_blank', title: href, on: { click: leaving } }, children);
}

/** An address that stands in the text by itself. */
export function bareLink(text, at) {
  BARE.lastIndex = at;
  const found = BARE.exec(text);
  const node = found && link(found[0], found[0]);
  return node ? { node, end: at + found[0].length } : null;
}

/** `[text](address)` and `![text](address)`; pictures are never loaded, they become links. */
export function markedLink(text, at, ends, inside) {
  const from = at + (text[at] === '!' ? 2 : 1);
  if (ends.get('](')) return null;
  const middle = text.indexOf('](', from);
  if (middle < 0) {
    ends.set('](', true);
    return null;
  }
  const close = text.indexOf(')', middle);
  const label = text.slice(from, middle);
  if (close < 0 || label.includes('\n\n') || label.includes('[') || close - middle > 2000) return null;
  const [address] = text.slice(middle + 2, close).trim().split(/\s+/);
  const node = link(address, inside(label || address));
  return node ? { node, end: close + 1 } : null;
}

/** Ask before the page is left: an answer may have written any address. */
function leaving(event) {
  event.preventDefault();
  const { href } = event.currentTarget;
  const dialog = byId('leave');
  const stay = el('button', { type: 'button', class: 'plain', on: { click: () => dialog.close() } }, 'Stay');
  const go = el('a', { class: 'plain main', href, rel: 'noopener noreferrer nofollow', target: '_blank', on: { click: () => dialog.close() } }, 'Open it');
  dialog.replaceChildren(el('h2', { id: 'leave-title' }, 'This link leaves the page'),
    el('p', { class: 'address' }, href), el('p', {}, 'The model wrote it. Open it only if you trust the address.'),
    el('div', { class: 'row' }, stay, go));
  dialog.showModal();
}
