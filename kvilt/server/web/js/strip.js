// The prompt of the last request, token by token: whose KV was reused, and what was computed.

import { el } from './dom.js';
import { count, tokens } from './numbers.js';

const SHOWN = 1500; // tokens; of longer prompts those around the place where reuse ends

/** The strip for `strs`, of which the first `reused` were not computed again. */
export function strip(strs, reused) {
  return el('div', { class: 'strip' }, track(reused, strs.length), text(strs, reused));
}

/** A bar of `all` tokens, of which some were reused. */
export function track(reused, all) {
  const bar = el('div', { class: 'track tall', role: 'img', 'aria-label': `${count(reused)} reused, ${count(all - reused)} computed` });
  for (const [kind, n] of [['reused', reused], ['computed', all - reused]]) {
    const part = el('span', { class: n ? `${kind} some` : kind });
    part.style.width = `${(100 * n) / Math.max(1, all)}%`;
    bar.append(part);
  }
  return bar;
}

function text(strs, reused) {
  const first = strs.length > SHOWN ? Math.max(0, Math.min(reused - SHOWN / 2, strs.length - SHOWN)) : 0;
  const last = Math.min(strs.length, first + SHOWN);
  const shown = readable(strs).slice(first, last);
  const before = first ? el('p', { class: 'left-out' }, `${tokens(first)} before`) : null;
  const after = last < strs.length ? el('p', { class: 'left-out' }, `${tokens(strs.length - last)} behind`) : null;
  const cells = shown.map((piece, i) => {
    const at = first + i;
    const kind = at < reused ? 'reused' : 'computed';
    return el('span', { class: `cell ${kind}`, title: `token ${at}, ${kind}` }, piece);
  });
  return el('div', { class: 'cells', tabindex: 0, 'aria-label': 'Prompt, token by token' }, before, cells, after);
}

/** Tokens that are parts of a character come as `bytes:\x..`; the last of them shows the character. */
function readable(strs) {
  const decoder = new TextDecoder();
  return strs.map((piece) => {
    if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(piece)) return piece.replaceAll('\n', '↵\n');
    const bytes = piece.slice(6).split('\\x').slice(1).map((hex) => Number.parseInt(hex, 16));
    return decoder.decode(new Uint8Array(bytes), { stream: true }) || '·';
  });
}
