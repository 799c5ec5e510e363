// Two branches of an answer side by side. What they begin with alike is marked: its KV is shared.

import { byId, el } from './dom.js';
import { count } from './numbers.js';

/** How many characters two texts share from the beginning; a word that differs counts from its first letter. */
export function sharedLength(one, other) {
  let same = 0;
  while (same < one.length && one[same] === other[same]) same += 1;
  if (same === one.length && same === other.length) return same;
  return Math.max(one.lastIndexOf(' ', same), one.lastIndexOf('\n', same)) + 1;
}

/** Show the branches beside `node`; `pick` shows one of them in the conversation. */
export function compare(tree, node, pick) {
  const dialog = byId('compare');
  const branches = tree.parent(node).children.map((id) => tree.nodes.get(id));
  const at = branches.indexOf(node);
  const shown = [at, at > 0 ? at - 1 : 1].toSorted((a, b) => a - b);
  const columns = el('div', { class: 'columns' });
  const draw = () => {
    const same = sharedLength(branches[shown[0]].text, branches[shown[1]].text);
    columns.replaceChildren(...[0, 1].map((side) => column(side, same)));
  };
  const column = (side, same) => {
    const options = branches.map((_, i) => el('option', { value: i, selected: i === shown[side] }, `Branch ${i + 1} of ${branches.length}`));
    const choice = el('select', { 'aria-label': side ? 'Right branch' : 'Left branch' }, options);
    choice.addEventListener('change', () => {
      shown[side] = Number(choice.value);
      draw();
    });
    const { text } = branches[shown[side]];
    const keep = () => {
      dialog.close();
      pick(branches[shown[side]]);
    };
    return el('section', { 'aria-label': `Branch ${shown[side] + 1}` },
      el('div', { class: 'entry-head' }, choice, el('button', { type: 'button', class: 'plain', on: { click: keep } }, 'Show this one')),
      el('div', { class: 'compared', dir: 'auto', tabindex: 0 }, same ? el('mark', {}, text.slice(0, same)) : null, text.slice(same)),
      el('p', {}, `${count(same)} of ${count(text.length)} characters shared`));
  };
  draw();
  dialog.replaceChildren(el('h2', { id: 'compare-title' }, 'Branches side by side'), columns,
    el('div', { class: 'row' }, el('button', { type: 'button', class: 'plain main', on: { click: () => dialog.close() } }, 'Done')));
  dialog.showModal();
}
