// Drawings of the inspector: the page pool as a map, and the tree of prefixes with widths by tokens.

import { el } from './dom.js';
import { count, tokens } from './numbers.js';

const MOST_CELLS = 600; // of the map: in a larger pool a cell is several pages
const COLOURS = 6;

/** Prefixes in the order of their tree, each with its depth and a colour for its root. */
function ordered(prefixes) {
  const under = Map.groupBy(prefixes, (one) => one.parent);
  const found = [];
  const walk = (one, depth, colour) => {
    found.push({ ...one, depth, colour });
    for (const next of under.get(one.id) ?? []) walk(next, depth + 1, colour);
  };
  (under.get(null) ?? []).forEach((one, i) => walk(one, 0, i % COLOURS));
  return found;
}

/** The pages as cells: those of each prefix, shared ones once; then other pages in use; then empty ones. */
export function poolMap({ pages, prefixes }) {
  const known = ordered(prefixes);
  const runs = known.map((one) => ({
    kind: one.caches ? `hue-${one.colour}` : `hue-${one.colour} idle`, pages: one.pages,
    title: `tokens ${count(one.start)}–${count(one.start + one.tokens)}, ${one.caches > 1 ? `shared by ${one.caches} caches` : one.caches ? 'in one cache' : 'kept, in no cache'}: ${one.text.slice(0, 80)}`,
  }));
  const held = known.filter((one) => one.caches).reduce((sum, one) => sum + one.pages, 0);
  const kept = known.filter((one) => !one.caches).reduce((sum, one) => sum + one.pages, 0);
  runs.push({ kind: 'other', pages: Math.max(0, pages.used - held), title: 'in use, in no prefix of this key: the ends of sequences, and what other keys hold' });
  runs.push({ kind: 'other idle', pages: Math.max(0, pages.kept - kept), title: 'kept for other prefixes' });
  const scale = Math.max(1, Math.ceil(pages.total / MOST_CELLS));
  const cells = runs.filter((run) => run.pages > 0).flatMap(({ kind, pages: n, title }) =>
    Array.from({ length: Math.max(1, Math.round(n / scale)) }, () => el('i', { class: kind, title })));
  const empty = Math.max(0, Math.round(pages.total / scale) - cells.length);
  cells.push(...Array.from({ length: empty }, () => el('i', { title: 'empty' })));
  return el('div', { class: 'pool-map', role: 'img', 'aria-label': `Map of ${count(pages.total)} pages, ${count(pages.used)} in use; a cell is ${scale === 1 ? 'a page' : `${scale} pages`}` }, cells);
}

/** The tree of prefixes, a row for each depth: a prefix is as wide as its tokens and stands below its parent. */
export function prefixDrawing(prefixes) {
  const under = Map.groupBy(prefixes, (one) => one.parent);
  const weight = (one) => Math.max(one.tokens, (under.get(one.id) ?? []).reduce((sum, next) => sum + weight(next), 0));
  const draw = (one, depth) => {
    const box = el('div', { class: one.caches ? 'node-box' : 'node-box idle', title: `${tokens(one.tokens)}: ${one.text.slice(0, 120)}` }, `${count(one.tokens)}`);
    const next = depth < 12 ? under.get(one.id) ?? [] : [];
    const made = el('div', { class: 'node' }, box, next.length ? el('div', { class: 'nodes' }, next.map((each) => draw(each, depth + 1))) : null);
    made.style.flexGrow = String(weight(one));
    return made;
  };
  const roots = under.get(null) ?? [];
  return el('div', { class: 'nodes drawing', role: 'img', 'aria-label': `Tree of ${count(prefixes.length)} prefixes, widths by tokens` }, roots.map((one) => draw(one, 0)));
}
