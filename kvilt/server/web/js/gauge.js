// How full the context is: tokens whose KV was reused, tokens computed, tokens written by the model.

import { el } from './dom.js';
import { count } from './numbers.js';

export class Gauge {
  constructor(holder) {
    this.parts = ['reused', 'computed', 'written'].map((kind) => el('span', { class: kind }));
    this.track = el('div', { class: 'track', role: 'meter', 'aria-label': 'Context', 'aria-valuemin': 0 }, this.parts);
    this.text = el('div', { class: 'legend' });
    holder.append(this.track, this.text);
  }

  /** Show the counts of the newest answer; `room` is the model's context. */
  show(usage, room) {
    const reused = usage?.prompt_tokens_details.cached_tokens ?? 0;
    const computed = (usage?.prompt_tokens ?? 0) - reused;
    const written = usage?.completion_tokens ?? 0;
    const total = reused + computed + written;
    [reused, computed, written].forEach((part, i) => {
      this.parts[i].classList.toggle('some', part > 0);
      this.parts[i].style.width = room ? `${Math.min(100, (100 * part) / room)}%` : '0';
    });
    this.track.setAttribute('aria-valuemax', room ?? 0);
    this.track.setAttribute('aria-valuenow', total);
    this.track.setAttribute('aria-valuetext', `${count(total)} of ${count(room ?? 0)} tokens, ${count(reused)} reused`);
    const facts = [['reused', reused], ['computed', computed], ['written', written]];
    this.text.replaceChildren(
      el('span', {}, room ? `${count(total)} / ${count(room)} tokens` : 'No model yet'),
      ...(usage ? facts : []).map(([kind, n]) => el('span', { class: `key ${kind}` }, `${count(n)} ${kind}`)));
  }
}
