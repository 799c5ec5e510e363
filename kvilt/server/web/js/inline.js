// Emphasis, code, links and formulas inside a line of text, as nodes. One pass from left to right; what has no end is plain text.

import { el } from './dom.js';
import { bareLink, markedLink } from './links.js';
import { formula } from './math.js';

const MARKS = [
  ['**', 'strong'],
  ['__', 'strong'],
  ['*', 'em'],
  ['_', 'em'],
  ['~~', 'del'],
];
const DEEPEST = 8;
const WORD = /[\p{L}\p{N}]/u;

/** The nodes of a text. */
export function inline(text, depth = 0) {
  const nodes = [];
  let plain = '';
  let at = 0;
  const ends = new Map(); // marks known to have no end behind here, so that many of them cost no more than one
  while (at < text.length) {
    const found = depth < DEEPEST ? span(text, at, depth, ends) : null;
    if (found) {
      if (plain) nodes.push(plain);
      nodes.push(found.node);
      plain = '';
      at = found.end;
    } else {
      const escaped = text[at] === '\\' && at + 1 < text.length && '\\`*_{}[]()#+-.!>'.includes(text[at + 1]);
      plain += text[at + (escaped ? 1 : 0)];
      at += escaped ? 2 : 1;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function span(text, at, depth, ends) {
  const sign = text[at];
  if (sign === '`') return code(text, at, ends);
  if (sign === '[' || (sign === '!' && text[at + 1] === '[')) return markedLink(text, at, ends, (label) => inline(label, depth + 1));
  if (sign === 'h' && !WORD.test(text[at - 1] ?? ' ')) return bareLink(text, at);
  if (sign === '$' || sign === '\\') return math(text, at, ends);
  if (sign !== '*' && sign !== '_' && sign !== '~') return null;
  const mark = MARKS.find(([sign]) => text.startsWith(sign, at));
  return mark ? emphasis(text, at, mark, depth, ends) : null;
}

function code(text, at, ends) {
  let ticks = 1;
  while (text[at + ticks] === '`') ticks += 1;
  const sign = '`'.repeat(ticks);
  const end = next(text, sign, at + ticks, ends);
  if (end < 0) return null;
  return { node: el('code', {}, text.slice(at + ticks, end).trim() || ' '), end: end + ticks };
}

/** `$...$` beside which no digit or letter stands (else it is money), and `\\(...\\)`. */
function math(text, at, ends) {
  const [open, close] = text[at] === '$' ? ['$', '$'] : ['\\(', '\\)'];
  const from = at + open.length;
  if (!text.startsWith(open, at) || /\s/.test(text[from] ?? ' ')) return null;
  const end = next(text, close, from, ends);
  if (end < 0 || /\s/.test(text[end - 1]) || (open === '$' && WORD.test(text[end + 1] ?? ' '))) return null;
  const tex = text.slice(from, end);
  const node = tex.includes('\n\n') ? null : formula(tex, false);
  return node && { node, end: end + close.length };
}

function emphasis(text, at, [sign, tag], depth, ends) {
  const from = at + sign.length;
  const opens = text[from] && !/\s/.test(text[from]) && !(sign[0] === '_' && WORD.test(text[at - 1] ?? ' '));
  if (!opens) return null;
  for (let end = next(text, sign, from + 1, ends); end > 0; end = next(text, sign, end + 1, ends)) {
    const after = text[end + sign.length] ?? ' ';
    const closes = !/\s/.test(text[end - 1]) && !(sign[0] === '_' && WORD.test(after));
    const part = sign.length === 1 && (after === sign || text[end - 1] === sign); // of a double mark
    if (closes && !part) return { node: el(tag, {}, inline(text.slice(from, end), depth + 1)), end: end + sign.length };
    if (end - from > 2000) return null;
  }
  return null;
}

function next(text, sign, from, ends) {
  if (ends.get(sign)) return -1;
  const end = text.indexOf(sign, from);
  if (end < 0) ends.set(sign, true);
  return end;
}
