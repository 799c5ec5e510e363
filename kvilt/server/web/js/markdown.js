// Markdown as nodes: paragraphs, headings, lists, tables, quotes, rules, formulas and code. HTML stays text.

import { el, icon } from './dom.js';
import { highlighted } from './highlight.js';
import { inline } from './inline.js';
import { formula } from './math.js';
import { alignments, cells, isTable } from './table.js';

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const FORMULA = /^ {0,3}(\$\$|\\\[)/;
const QUOTE = /^ {0,3}>\s?(.*)$/;

/** Blocks as `{kind, source, ...}`. The source tells whether a block is the same as last time. */
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, '\n').split('\n');
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const block = lines[at].trim() ? read(lines, at) : { end: at + 1 };
    if (block.kind) found.push({ ...block, source: lines.slice(at, block.end).join('\n') });
    at = block.end;
  }
  return found;
}

function read(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: 'heading', level: heading[1].length, text: heading[2], end: at + 1 };
  if (RULE.test(line)) return { kind: 'rule', end: at + 1 };
  if (QUOTE.test(line)) return run(lines, at, 'quote', (next) => QUOTE.test(next));
  if (FORMULA.test(line)) return display(lines, at);
  if (isTable(lines, at)) return run(lines, at, 'table', (next) => next.includes('|') && next.trim());
  if (ITEM.test(line)) return run(lines, at, 'list', (next) => sameList(line, next) || /^\s+\S/.test(next));
  return run(lines, at, 'paragraph', (next) => next.trim() && !begins(next));
}

const isNumbered = (item) => /^\d/.test(item[2]);

/** Whether a line is an item of the list that another began: a bullet behind numbers begins a list of its own. */
function sameList(first, line) {
  const [one, other] = [ITEM.exec(first), ITEM.exec(line)];
  return Boolean(other) && (isNumbered(one) === isNumbered(other) || other[1].length > one[1].length + 1);
}

/** A formula on lines of its own; one that never ends is a paragraph. */
function display(lines, at) {
  const open = FORMULA.exec(lines[at])[1];
  const close = open === '$$' ? '$$' : '\\]';
  const rest = lines.slice(at, at + 40).join('\n');
  const from = rest.indexOf(open) + 2;
  const end = rest.indexOf(close, from);
  if (end < 0) return { kind: 'paragraph', lines: [lines[at]], end: at + 1 };
  const taken = rest.slice(0, end).split('\n').length;
  return { kind: 'formula', text: rest.slice(from, end), lines: lines.slice(at, at + taken), end: at + taken };
}

const begins = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(line));

function run(lines, at, kind, belongs) {
  let end = at + 1;
  while (end < lines.length && (belongs(lines[end]) || (kind === 'list' && !lines[end].trim() && sameList(lines[at], lines[end + 1] ?? '')))) end += 1;
  return { kind, lines: lines.slice(at, end), end };
}

function fenced(lines, at, [, sign, language]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(sign) && !lines[end].trim().slice(sign.length).trim())) end += 1;
  return { kind: 'code', language, text: lines.slice(at + 1, end).join('\n'), end: Math.min(end + 1, lines.length) };
}

const RIGHT_TO_LEFT = /\p{Script=Arabic}|\p{Script=Hebrew}|\p{Script=Syriac}|\p{Script=Thaana}|\p{Script=Nko}/u;

/** Each block finds the direction of its own text: Arabic and Hebrew begin at the right. */
const facing = (text) => (RIGHT_TO_LEFT.test(text) ? { dir: 'auto' } : {});

/** A block as an element. */
export function shown(block, depth = 0) {
  switch (block.kind) {
    case 'heading':
      return el(`h${Math.min(6, block.level + 2)}`, facing(block.text), inline(block.text));
    case 'rule':
      return el('hr');
    case 'quote':
      return quote(block.lines, depth);
    case 'list':
      return list(block.lines.filter((line) => line.trim()), depth);
    case 'table':
      return table(block.lines);
    case 'formula':
      return formula(block.text, true) ?? el('p', {}, broken(block.lines));
    case 'code':
      return codeBlock(block);
    default:
      return el('p', facing(block.lines[0]), broken(block.lines.map((line) => line.trim())));
  }
}

/** Lines with their breaks: models mean them. */
function broken(lines) {
  return inline(lines.join('\n')).flatMap((node) =>
    typeof node === 'string' ? node.split('\n').flatMap((part, i) => (i ? [el('br'), part] : [part])) : [node]);
}

function quote(lines, depth) {
  const inner = lines.map((line) => QUOTE.exec(line)[1]).join('\n');
  return el('blockquote', facing(inner), depth < 6 ? blocks(inner).map((block) => shown(block, depth + 1)) : inner);
}

function list(lines, depth) {
  const [, indent, sign] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push({ text: item[3], rest: [] });
    else items.at(-1).rest.push(line);
  }
  const number = /^\d/.test(sign) ? Number.parseInt(sign, 10) : null;
  const props = number !== null && number !== 1 ? { start: number } : {};
  return el(number === null ? 'ul' : 'ol', { ...facing(lines[0]), ...props }, items.map(({ text, rest }) => listItem(text, rest, depth)));
}

/** Nested lines as lists: one for each kind of item that follows another. */
function lists(lines, depth) {
  const parts = [[lines[0]]];
  for (const line of lines.slice(1)) {
    const item = ITEM.exec(line);
    const deeper = !item || item[1].length > ITEM.exec(parts.at(-1)[0])[1].length + 1;
    if (deeper || sameList(parts.at(-1)[0], line)) parts.at(-1).push(line);
    else parts.push([line]);
  }
  return parts.map((part) => list(part, depth));
}

function table(lines) {
  const aligned = alignments(lines[1]);
  const row = (tag, line) => el('tr', {}, aligned.map((align, i) => el(tag, { ...facing(cells(line)[i] ?? ''), ...(tag === 'th' ? { scope: 'col' } : {}), class: align || null }, inline(cells(line)[i] ?? ''))));
  return el('div', { class: 'table', tabindex: 0, role: 'region', 'aria-label': 'Table' },
    el('table', {}, el('thead', {}, row('th', lines[0])), el('tbody', {}, lines.slice(2).map((line) => row('td', line)))));
}

function listItem(text, rest, depth) {
  const nested = rest.findIndex((line) => ITEM.test(line));
  const more = nested < 0 ? rest : rest.slice(0, nested);
  const item = el('li', facing(text), broken([text, ...more.map((line) => line.trim())]));
  if (nested >= 0 && depth < 6) item.append(...lists(rest.slice(nested), depth + 1));
  else if (nested >= 0) item.append(...rest.slice(nested));
  return item;
}

function codeBlock({ language, text }) {
  const copy = el('button', { type: 'button', class: 'small', 'aria-label': 'Copy code', title: 'Copy code' }, icon('copy'));
  copy.addEventListener('click', () => copyText(text, copy));
  return el('div', { class: 'code' },
    el('div', { class: 'code-head' }, el('span', {}, language || 'text'), copy),
    el('pre', { tabindex: 0, 'aria-label': language ? `Code, ${language}` : 'Code' }, el('code', {}, highlighted(text, language))));
}

/** Copy, and say so on the button for a moment. */
export async function copyText(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = false; // not over https, or forbidden
  }
  button.replaceChildren(icon(copied ? 'check' : 'close'));
  setTimeout(() => button.replaceChildren(icon('copy')), 1200);
}

/** Bring `holder` up to date with `text`, leaving blocks that did not change as they are: selections survive. */
export function update(holder, text) {
  const wanted = blocks(text);
  const had = holder.sources ?? [];
  let same = 0;
  while (same < wanted.length && same < had.length && wanted[same].source === had[same]) same += 1;
  while (holder.childNodes.length > same) holder.lastChild.remove();
  holder.append(...wanted.slice(same).map((block) => shown(block)));
  holder.sources = wanted.map((block) => block.source);
}
