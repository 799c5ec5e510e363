// The parts of the inspector as elements: pages, answers in progress, the tree of prefixes, handles.

import { el, iconButton } from './dom.js';
import { bytes, count, seconds, tokens } from './numbers.js';

const DEEPEST = 12;

/** How full the page pool is. */
export function pool(pages) {
  const { total, used, kept, free, shared } = pages;
  const bar = el('div', { class: 'track tall', role: 'img', 'aria-label': `${count(used)} of ${count(total)} pages in use` });
  for (const [kind, n] of [['held', used], ['kept', kept]]) {
    const part = el('span', { class: n ? `${kind} some` : kind });
    part.style.width = `${(100 * n) / total}%`;
    bar.append(part);
  }
  const facts = [
    ['key held', `${count(used)} in use`], ['key kept', `${count(kept)} kept for later`], ['', `${count(free - kept)} empty`],
    ['', `${count(shared)} shared`], ['', bytes(pages.used_bytes)], ['', `${pages.page_tokens} tokens a page`],
  ];
  return [bar, el('div', { class: 'legend' }, facts.map(([kind, text]) => el('span', { class: kind }, text)))];
}

/** Answers in progress. */
export function running(samples) {
  return samples.map((one) => el('div', { class: 'entry' },
    el('div', { class: 'entry-head' }, el('span', { class: 'name' }, one.request.slice(0, 17)), el('span', { class: 'tag' }, one.state)),
    el('p', {}, `${tokens(one.tokens)}, ${count(one.cached)} of the prompt reused; ${count(one.pages)} pages, ${count(one.shared_pages)} shared`)));
}

/** Prefixes as a tree, each with the handles that end in it. `handle` makes a handle's element. */
export function forest(state, handle) {
  const under = Map.groupBy(state.prefixes, (one) => one.parent);
  const ending = Map.groupBy(state.handles, (one) => one.prefix);
  const branch = (one, depth) => el('li', {},
    prefix(one),
    (ending.get(one.id) ?? []).map(handle),
    (under.get(one.id) ?? []).length && depth < DEEPEST ? el('ul', {}, under.get(one.id).map((next) => branch(next, depth + 1))) : null);
  const loose = (ending.get(null) ?? []).map(handle);
  const trees = (under.get(null) ?? []).map((one) => branch(one, 0));
  return el('ul', { class: 'forest' }, trees, loose.length ? el('li', {}, el('p', { class: 'loose' }, 'Not in a known prefix'), loose) : null);
}

function prefix(one) {
  const end = one.start + one.tokens;
  const use = one.caches === 0 ? 'kept, in no cache' : one.caches === 1 ? 'in one cache' : `shared by ${count(one.caches)} caches`;
  return el('div', { class: 'entry prefix' },
    el('div', { class: 'entry-head' },
      el('span', { class: 'name' }, `tokens ${count(one.start)}–${count(end)}`),
      el('span', { class: one.caches > 1 ? 'tag shared' : 'tag' }, use),
      el('span', { class: 'tag' }, `${count(one.hits)} ${one.hits === 1 ? 'hit' : 'hits'}`)),
    el('p', { class: 'excerpt' }, one.text.replace(/\s+/g, ' ')));
}

/** A handle with its verbs. `acts` has fork, truncate, pin and remove; `whose` says which message it belongs to. */
export function handleRow(one, whose, acts) {
  const facts = [tokens(one.tokens), one.resident ? bytes(one.kv_bytes) : 'not in memory', `${seconds(one.expires_in_s)} left`];
  const row = el('div', { class: 'entry handle', 'data-handle': one.id },
    el('div', { class: 'entry-head' },
      el('span', { class: 'name mono' }, one.id.slice(0, 8)),
      whose ? el('span', { class: 'tag mine' }, whose) : null,
      one.pinned ? el('span', { class: 'tag shared' }, 'pinned') : null,
      el('span', { class: 'verbs' },
        iconButton('fork', `Fork ${one.id.slice(0, 8)}`, () => acts.fork(one)),
        iconButton('cut', `Truncate ${one.id.slice(0, 8)}`, () => cutting(row, one, acts)),
        iconButton('edit', `Replace tokens of ${one.id.slice(0, 8)}`, () => replacing(row, one, acts)),
        iconButton('save', `Save ${one.id.slice(0, 8)}`, () => saving(row, one, acts)),
        iconButton('pin', `Pin ${one.id.slice(0, 8)} for an hour`, () => acts.pin(one)),
        iconButton('bin', `Delete ${one.id.slice(0, 8)}`, () => acts.remove(one)))),
    el('p', {}, facts.join(' · ')));
  return row;
}

/** Ask in the row itself: a form with these parts, whose submission is told to `done`. */
function asking(row, parts, done) {
  if (row.querySelector('form')) return;
  const form = el('form', { class: 'cutting' }, parts,
    el('button', { type: 'button', class: 'plain', on: { click: () => form.remove() } }, 'Cancel'));
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    form.remove();
    done();
  });
  form.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    event.preventDefault();
    form.remove();
  });
  row.append(form);
  const input = form.querySelector('input');
  input.focus();
  input.select();
}

const go = (label) => el('button', { type: 'submit', class: 'plain main' }, label);

function numberBox(label, value, max) {
  const input = el('input', { type: 'number', min: 0, max, required: true, 'aria-label': label });
  input.value = value;
  return input;
}

function cutting(row, one, acts) {
  const input = numberBox('Tokens to keep', one.tokens, one.tokens);
  input.min = 1;
  asking(row, ['Keep', input, 'tokens', go('Cut')], () => acts.truncate(one, input.valueAsNumber));
}

function saving(row, one, acts) {
  const input = el('input', { type: 'text', required: true, pattern: '[A-Za-z0-9][A-Za-z0-9._\\-]*', 'aria-label': 'Name of the file' });
  input.value = `kv-${one.id.slice(0, 8)}`;
  asking(row, ['As', input, go('Save')], () => acts.save(one, input.value));
}

function replacing(row, one, acts) {
  const [start, stop] = [numberBox('First token', 0, one.tokens), numberBox('Token behind the last', one.tokens, one.tokens)];
  const text = el('input', { type: 'text', 'aria-label': 'Text in their place' });
  asking(row, ['Tokens', start, 'to', stop, 'become', text, go('Replace')], () => acts.replace(one, start.valueAsNumber, stop.valueAsNumber, text.value));
}

/** KV that was saved, with what restores it. */
export function savedRows(saved, acts) {
  return saved.map((one) => el('div', { class: 'entry handle' }, el('div', { class: 'entry-head' },
    el('span', { class: 'name mono' }, one.name), el('span', { class: 'tag' }, bytes(one.bytes)),
    el('span', { class: 'verbs' },
      iconButton('again', `Restore ${one.name}`, () => acts.restore(one)), iconButton('bin', `Delete ${one.name}`, () => acts.unsave(one))))));
}

/** What the quality checks of blended prompts found. */
export function certificateRows(certificates) {
  return certificates.map((one) => el('div', { class: 'entry' },
    el('div', { class: 'entry-head' }, el('span', { class: 'name' }, `${one.strategy} ${Math.round(one.ratio * 100)} %`),
      one.falls_back ? el('span', { class: 'tag' }, 'computed whole') : null, el('span', { class: 'tag' }, `${count(one.count)} compared`)),
    one.mean_kl === null ? null : el('p', {}, `mean KL ${one.mean_kl.toFixed(3)}${one.agreement === null ? '' : `, first token agrees in ${Math.round(100 * one.agreement)} %`}`)));
}
