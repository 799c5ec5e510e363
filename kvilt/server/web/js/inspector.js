// The panel that shows KV at work: what the server holds for this key, and the last prompt as a strip.

import { advice } from './advice.js';
import { blendMap } from './blend_map.js';
import { byId, el, iconButton, set } from './dom.js';
import { poolMap, prefixDrawing } from './inspector_map.js';
import { certificateRows, forest, handleRow, pool, running, savedRows } from './inspector_rows.js';
import { missNote } from './miss.js';
import { count } from './numbers.js';
import { events } from './sse.js';
import { strip, track } from './strip.js';
import { Timeline, tierRows } from './timeline.js';

const EVERY_MS = 2000;
const PIN_S = 3600;

/** Scroll to where reuse ends: what is behind it is what the request cost. */
function showEnd(cells) {
  const first = cells.querySelector('.computed');
  if (first) cells.scrollTop = first.offsetTop - cells.offsetTop - cells.clientHeight / 2;
}

export class Inspector {
  /** `last` returns the last request as `{messages, usage, model}`, or null. */
  constructor({ api, book, tree, last }) {
    Object.assign(this, { api, book, tree, last });
    this.panel = byId('inspector');
    this.button = byId('inspect');
    this.button.addEventListener('click', () => (this.panel.hidden ? this.open() : this.close()));
    const part = (title, name) => [el('h3', {}, title), (this[name] = el('div', { class: 'part' }))];
    this.note = el('p', { class: 'trouble', role: 'alert', hidden: true });
    this.panel.append(
      el('div', { class: 'panel-head' }, el('h2', {}, 'KV inspector'), iconButton('close', 'Close the inspector', () => this.close())),
      this.note,
      ...part('Last prompt', 'prompt'), ...part('Page pool', 'pool'),
      ...part('Last minute', 'time'),
      (this.runningTitle = el('h3', {}, 'In progress')), (this.running = el('div', { class: 'part' })),
      ...part('Prefixes and handles', 'tree_'),
      (this.tiersTitle = el('h3', { hidden: true }, 'Store')), (this.tiers = el('div', { class: 'part' })),
      (this.savedTitle = el('h3', { hidden: true }, 'Saved')), (this.saved = el('div', { class: 'part' })),
      (this.certificatesTitle = el('h3', { hidden: true }, 'Quality of blended prompts')), (this.certificates = el('div', { class: 'part' })));
    this.stripOf = null;
    this.timeline = new Timeline();
  }

  contains(element) {
    return this.panel.contains(element);
  }

  open() {
    this.panel.hidden = false;
    set(this.button, 'aria-expanded', 'true');
    this.restShown = false;
    this.refresh();
    this.watching = new AbortController();
    this.watch(this.watching.signal);
  }

  /** One stream of events while the panel is open. Where it breaks, ask once, and open it again. */
  async watch(signal) {
    while (!signal.aborted) {
      try {
        for await (const state of events(await this.api.watch('v1/kv/state', signal))) {
          this.timeline.add(state);
          if (!document.hidden) this.live(state);
        }
      } catch {
        if (signal.aborted) return;
        await this.refresh();
      }
      await new Promise((wake) => setTimeout(wake, EVERY_MS));
    }
  }

  live(state) {
    this.show(state);
    this.showStrip().catch((error) => this.complain(error));
    this.time.replaceChildren(...this.timeline.draw());
    const tiers = state.totals?.tiers ?? [];
    this.tiersTitle.hidden = !tiers.length;
    this.tiers.replaceChildren(...tierRows(tiers, state.totals?.lookups));
  }

  close() {
    this.panel.hidden = true;
    set(this.button, 'aria-expanded', 'false');
    this.watching?.abort();
    this.button.focus();
  }

  /** Ask the server again; nothing while the panel is closed or another question is under way. */
  async refresh() {
    if (this.panel.hidden || this.asking) return;
    this.asking = true;
    try {
      await this.showStrip();
      this.show(await this.api.call('GET', 'v1/kv/state'));
      await this.showRest();
      this.note.hidden = true;
    } catch (error) {
      this.complain(error);
    } finally {
      this.asking = false;
    }
  }

  complain(error) {
    const { what, next } = advice(error);
    this.note.hidden = false;
    this.note.replaceChildren(el('strong', {}, what), ' ', next);
  }

  async showStrip() {
    const last = this.last();
    if (last && last === this.stripOf) return;
    this.stripOf = last;
    if (!last) {
      this.prompt.replaceChildren(el('p', { class: 'empty' }, 'Send a message to see what of its prompt is computed.'));
      return;
    }
    if (last.usage.kvilt?.documents?.length) return this.showBlended(last);
    const { token_strs: strs } = await this.api.call('POST', 'tokenize', { messages: last.messages, return_token_strs: true });
    const reused = last.usage.prompt_tokens_details.cached_tokens;
    this.prompt.replaceChildren(strip(strs, reused), el('div', { class: 'legend' },
      el('span', { class: 'key reused' }, `${count(reused)} reused`),
      el('span', { class: 'key computed' }, `${count(strs.length - reused)} computed`)), ...missNote(last.usage.kvilt?.miss, reused));
    showEnd(this.prompt.querySelector('.cells'));
  }

  /** A prompt with documents: they stand where the template puts them, so what is shown is their text. */
  showBlended({ usage, titles }) {
    const reused = usage.prompt_tokens_details.cached_tokens;
    const map = blendMap(usage.kvilt.documents, titles ?? []);
    map.open = true;
    this.prompt.replaceChildren(track(reused, usage.prompt_tokens), el('div', { class: 'legend' },
      el('span', { class: 'key reused' }, `${count(reused)} reused`), el('span', { class: 'key computed' }, `${count(usage.prompt_tokens - reused)} computed`)), map);
  }

  /** What changes seldom: asked for when the panel opens and after each verb. */
  async showRest() {
    if (this.restShown) return;
    this.restShown = true;
    const [saved, certificates] = await Promise.all(['v1/kv/saved', 'v1/kv/certificates'].map((path) => this.api.call('GET', path).catch(() => ({ data: [] }))));
    this.savedTitle.hidden = !saved.data.length;
    this.saved.replaceChildren(...savedRows(saved.data, {
      restore: (one) => this.act('POST', 'v1/kv/restore', { name: one.name }),
      unsave: (one) => this.act('DELETE', `v1/kv/saved/${encodeURIComponent(one.name)}`),
    }));
    this.certificatesTitle.hidden = !certificates.data.length;
    this.certificates.replaceChildren(...certificateRows(certificates.data));
  }

  show(state) {
    this.state = state;
    this.pool.replaceChildren(...pool(state.pages), poolMap(state));
    this.running.replaceChildren(...running(state.samples));
    this.runningTitle.hidden = state.samples.length === 0;
    // Built again only where something changed, and not while the user interacts with it.
    const seen = JSON.stringify([state.prefixes, state.handles.map(({ expires_in_s: left, ...one }) => [one, Math.round(left / 60)])]);
    if (seen === this.seen || this.tree_.querySelector('form')) return;
    this.seen = seen;
    this.keepingFocus(() => {
      const empty = state.prefixes.length + state.handles.length === 0;
      this.tree_.replaceChildren(empty ? el('p', { class: 'empty' }, 'Nothing is held for this key.') : forest(state, (one) => this.handle(one)));
      if (state.prefixes.length) this.tree_.prepend(prefixDrawing(state.prefixes));
    });
  }

  keepingFocus(change) {
    const had = document.activeElement;
    const label = this.tree_.contains(had) ? had.getAttribute('aria-label') : null;
    const top = this.panel.scrollTop;
    change();
    this.panel.scrollTop = top;
    if (label) [...this.tree_.querySelectorAll('button')].find((one) => one.getAttribute('aria-label') === label)?.focus();
  }

  handle(one) {
    return handleRow(one, this.whose(one.id), {
      fork: () => this.act('POST', `v1/kv/${one.id}/fork`, {}),
      pin: () => this.act('POST', `v1/kv/${one.id}/pin`, { ttl_s: PIN_S }),
      save: (_, name) => this.act('POST', `v1/kv/${one.id}/save`, { name }),
      replace: (_, start, stop, text) => this.act('POST', `v1/kv/${one.id}/replace`, { start, stop, text }),
      truncate: (_, length) => this.truncate(one, length),
      remove: () => this.remove(one),
    });
  }

  /** Which message of this conversation a handle belongs to. */
  whose(id) {
    for (const node of this.tree().nodes.values()) {
      const turn = Math.ceil(this.tree().upTo(node).length / 2);
      if (node.kv?.id === id) return `answer ${turn}.${this.tree().placeOf(node).at + 1}`;
      if (node.promptKv?.id === id) return `question ${turn}`;
    }
    return null;
  }

  truncate(one, length) {
    this.book.forget(one.id); // a message's handle that is shorter now is not the message's any more
    return this.act('POST', `v1/kv/${one.id}/truncate`, { length });
  }

  remove(one) {
    this.book.forget(one.id);
    return this.act('DELETE', `v1/kv/${one.id}`);
  }

  async act(method, path, body) {
    try {
      await this.api.call(method, path, body);
      this.seen = null;
      this.restShown = false;
      await this.refresh();
    } catch (error) {
      this.complain(error);
    }
  }
}
