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
    this.seconds.push({ prefill: Math.max(0, more('computed_tokens') - decode), decode, steps: more('steps'), accepted: more('accepted_tokens'), drafted: more('drafted_tokens') });
    this.seconds = this.seconds.slice(-SHOWN);
  }

  draw() {
    const most = Math.max(1, ...this.seconds.map((one) => one.prefill + one.decode));
    const bars = this.seconds.map((one) => {
      const drafts = one.drafted ? `, ${count(one.accepted)} of ${count(one.drafted)} drafts accepted` : '';
      const bar = el('span', { class: 'second', title: `${count(one.steps)} steps: ${count(one.prefill)} tokens of prompts, ${count(one.decode)} of answers${drafts}` });
      for (const kind of ['prefill', 'decode']) {
        const part = el('i', { class: kind });
        part.style.height = `${(100 * one[kind]) / most}%`;
        bar.append(part);
      }
      return bar;
    });
    const sum = (kind) => count(this.seconds.reduce((all, one) => all + one[kind], 0));
    return [
      el('div', { class: 'timeline', role: 'img', 'aria-label': `The last ${this.seconds.length} seconds: ${sum('prefill')} tokens of prompts, ${sum('decode')} of answers` }, bars),
      el('div', { class: 'legend' }, el('span', { class: 'key computed' }, `${sum('prefill')} of prompts`), el('span', { class: 'key written' }, `${sum('decode')} of answers`),
        el('span', {}, `in ${this.seconds.length} s`)),
    ];
  }
}

function ownTotals(samples) {
  const sum = (of) => samples.reduce((all, one) => all + of(one), 0);
  return { computed_tokens: sum((one) => one.computed), generated_tokens: sum((one) => Math.max(0, one.tokens - one.prompt_tokens)) };
}

/** The tiers of the store. */
export function tierRows(tiers) {
  return tiers.map((one) => el('div', { class: 'entry' }, el('div', { class: 'entry-head' },
    el('span', { class: 'name' }, one.tier), el('span', { class: 'tag' }, `${count(one.records ?? 0)} records`), el('span', { class: 'tag' }, bytes(one.bytes ?? 0)),
    el('span', { class: 'tag' }, `${count(one.hits ?? 0)} hits`), one.up === 0 ? el('span', { class: 'tag' }, 'left alone after errors') : null)));
}
