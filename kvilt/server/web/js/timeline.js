// What the server does, second by second: tokens of prompts, tokens of answers, accepted drafts. Where a key may not see
// the counters of all keys, the tokens of its own requests in progress.

import { el } from './dom.js';
import { bytes, count } from './numbers.js';

const SHOWN = 60; // seconds

export class Timeline {
  constructor() {
    this.seconds = [];
    this.before = null;
  }

  /** Take an event of the stream. */
  add(state) {
    const now = state.totals ?? ownTotals(state.samples);
    const { before } = this;
    this.before = now;
    if (!before) return;
    const more = (name) => Math.max(0, (now[name] ?? 0) - (before[name] ?? 0));
    const decode = more('generated_tokens');
    this.seconds.push({ prefill: Math.max(0, more('computed_tokens') - decode), decode, steps: more('steps'), rows: more('rows'), accepted: more('accepted_tokens'), drafted: more('drafted_tokens') });
    this.seconds = this.seconds.slice(-SHOWN);
  }

  draw() {
    const most = Math.max(1, ...this.seconds.map((one) => one.prefill + one.decode));
    const bars = this.seconds.map((one) => {
      const bar = el('span', { class: 'second', title: `${worked(one)}: ${count(one.prefill)} tokens of prompts, ${count(one.decode)} of answers${drafted(one)}` });
      for (const kind of ['prefill', 'decode']) {
        const part = el('i', { class: kind });
        part.style.height = `${(100 * one[kind]) / most}%`;
        bar.append(part);
      }
      return bar;
    });
    const sum = (kind) => count(total(this.seconds)[kind]);
    const all = total(this.seconds);
    return [
      el('div', { class: 'timeline', role: 'img', 'aria-label': `The last ${this.seconds.length} seconds: ${sum('prefill')} tokens of prompts, ${sum('decode')} of answers` }, bars),
      el('div', { class: 'legend' }, el('span', { class: 'key computed' }, `${sum('prefill')} of prompts`), el('span', { class: 'key written' }, `${sum('decode')} of answers`),
        all.steps ? el('span', {}, `${worked(all)}${drafted(all)}`) : null, el('span', {}, `in ${this.seconds.length} s`)),
    ];
  }
}

const COUNTED = ['prefill', 'decode', 'steps', 'rows', 'accepted', 'drafted'];

function total(seconds) {
  return Object.fromEntries(COUNTED.map((name) => [name, seconds.reduce((all, one) => all + one[name], 0)]));
}

const worked = ({ steps, rows }) => `${count(steps)} ${steps === 1 ? 'step' : 'steps'} of ${count(rows)} rows`;
const drafted = ({ accepted, drafted: all }) => (all ? `, ${count(accepted)} of ${count(all)} drafts accepted` : '');

function ownTotals(samples) {
  const sum = (of) => samples.reduce((all, one) => all + of(one), 0);
  return { computed_tokens: sum((one) => one.computed), generated_tokens: sum((one) => Math.max(0, one.tokens - one.prompt_tokens)) };
}

/** The tiers of the store; `lookups` were asked of all of them. */
export function tierRows(tiers, lookups) {
  const tag = (text) => el('span', { class: 'tag' }, text);
  return tiers.map((one) => {
    const hits = one.hits ?? 0;
    const rate = lookups ? `, ${Math.round((100 * hits) / lookups)} % of lookups` : '';
    const lost = [['refused', 'not used'], ['dropped', 'not written'], ['evicted', 'evicted']].filter(([name]) => one[name]).map(([name, says]) => `${count(one[name])} ${says}`);
    const failure = one.last_failure;
    return el('div', { class: 'entry' }, el('div', { class: 'entry-head' },
      el('span', { class: 'name' }, one.tier), tag(`${count(one.records ?? 0)} records`), tag(bytes(one.bytes ?? 0)), tag(`${count(hits)} hits${rate}`),
      one.up === 0 ? tag('left alone after errors') : null),
    lost.length ? el('p', {}, lost.join(', ')) : null,
    failure ? el('p', { class: 'last-failure' }, `Last error at ${clock.format(1000 * failure.at_s)}: ${failure.message}`) : null);
  });
}

const clock = new Intl.DateTimeFormat('en', { timeStyle: 'medium' });
