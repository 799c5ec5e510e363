// The documents of a blended answer as text, coloured by whether their KV was reused or computed again.

import { el } from './dom.js';
import { count, tokens } from './numbers.js';

/** `documents` as the usage has them; `titles` of the documents that were sent. */
export function blendMap(documents, titles) {
  const named = documents.length === titles.length ? titles : documents.map((_, i) => `Document ${i + 1}`);
  return el('details', { class: 'blend-map' }, el('summary', {}, 'Which tokens of the documents were computed again'),
    documents.map((one, i) => shown(one, named[i])),
    el('div', { class: 'legend' }, el('span', { class: 'key reused' }, 'reused'), el('span', { class: 'key computed' }, 'computed again')));
}

function shown({ tokens: all, pieces }, title) {
  const again = pieces.filter((one) => one.recomputed).reduce((sum, one) => sum + one.tokens, 0);
  const cells = pieces.map(({ text, recomputed, tokens: n }) => {
    const says = recomputed ? 'computed again' : 'reused';
    return el(recomputed ? 'mark' : 'span', { class: `cell ${recomputed ? 'computed' : 'reused'}`, title: `${tokens(n)} ${says}` }, text);
  });
  return el('section', { 'aria-label': title }, el('p', { class: 'title', dir: 'auto' }, title, el('small', {}, ` ${count(again)} of ${tokens(all)} computed again`)),
    el('div', { class: 'cells', tabindex: 0, dir: 'auto', 'aria-label': `Text of ${title}` }, cells));
}
