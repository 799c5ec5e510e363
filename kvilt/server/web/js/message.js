// One message of the conversation on the page. Knows how it looks; what its buttons do is told to it.

import { advice } from './advice.js';
import { blendMap } from './blend_map.js';
import { speeds } from './ask.js';
import { callCards } from './calls.js';
import { checkNote } from './check.js';
import { el, icon, iconButton, set } from './dom.js';
import { copyText, update } from './markdown.js';
import { missText } from './miss.js';
import { count, rate, seconds, tokens } from './numbers.js';
import { schemaState } from './schema.js';
import { local } from './storage.js';
import { answerTokens, tokenView } from './tokens.js';

const BRANCHES = { usual: 3, most: 16 }; // at once
const NAMES = { user: 'You', assistant: 'Answer', tool: 'Results of tools' };

export class Message {
  /** `acts` has edit, regenerate, retry and walk; `tree` returns the conversation. */
  constructor(node, tree, acts) {
    this.node = node;
    this.tree = tree;
    this.acts = acts;
    this.body = el('div', { class: 'body' });
    this.bar = el('div', { class: 'bar' });
    this.element = el('article', { class: `message ${node.role}`, tabindex: -1, 'data-id': node.id }, this.body, this.bar);
    this.editing = false;
    this.build();
  }

  build() {
    if (this.node.role === 'assistant') {
      this.thought = el('details', { class: 'thought', hidden: true }, el('summary', {}, 'Reasoning'));
      this.thoughtText = el('div', { class: 'md' });
      this.thought.append(this.thoughtText);
      this.text = el('div', { class: 'md' });
      this.waiting = el('div', { class: 'waiting', hidden: true });
      this.trouble = el('div', { class: 'trouble', role: 'alert', hidden: true });
      this.checked = el('div', { hidden: true });
      this.blend = el('div', { hidden: true });
      this.calls = el('div', { hidden: true });
      this.body.append(this.thought, this.text, this.calls, this.waiting, this.blend, this.checked, this.trouble);
    }
    this.update();
  }

  /** Bring everything up to date with the node. */
  update(busy = false) {
    const { node } = this;
    const { at, of } = this.tree().placeOf(node);
    const which = of > 1 ? `, branch ${at + 1} of ${of}` : '';
    set(this.element, 'aria-label', `${NAMES[node.role]}${which}`);
    set(this.element, 'aria-busy', node.state === 'streaming' ? 'true' : null);
    if (node.role === 'assistant') this.updateAnswer();
    else if (node.role === 'tool') this.body.replaceChildren(...node.results.map(({ name, content }) => el('div', { class: 'said' }, el('small', { class: 'mono' }, name), el('br'), content)));
    else if (!this.editing) this.body.replaceChildren(el('div', { class: 'said', dir: 'auto' }, node.text));
    if (!this.editing) this.updateBar(busy, at, of);
  }

  updateAnswer() {
    const { node } = this;
    if (!this.editing) this.updateText();
    this.thought.hidden = !node.reasoning;
    if (node.reasoning) update(this.thoughtText, node.reasoning);
    this.updateCalls();
    const isWaiting = node.state === 'streaming' && !node.text && !node.reasoning && !node.calls;
    this.waiting.hidden = !isWaiting;
    if (isWaiting) this.updateWaiting();
    this.updateTrouble();
    this.updateBlend();
    this.checked.hidden = !node.checked;
    if (node.checked) this.checked.replaceChildren(checkNote(node));
  }

  /** The answer as Markdown, or as tokens where that was asked for. */
  updateText() {
    const { node } = this;
    const known = this.asTokens && node.state !== 'streaming' ? answerTokens(node) : null;
    if (!known) {
      if (this.text.querySelector('.token-view')) this.text.replaceChildren();
      update(this.text, node.text);
    } else if (!this.text.querySelector('.token-view')) {
      this.text.replaceChildren(tokenView(node, (index, token) => this.acts.fork(node, index, token)));
      this.text.sources = null;
    }
  }

  /** Drawn again when calls grow, or were answered: what is typed stays. */
  updateCalls() {
    const { node } = this;
    this.calls.hidden = !node.calls?.length;
    const seen = JSON.stringify([node.calls, node.state, node.children.length > 0]);
    if (this.calls.hidden || this.callsSeen === seen) return;
    this.callsSeen = seen;
    const open = node.state !== 'streaming' && !node.children.length;
    this.calls.replaceChildren(callCards(node, open ? (results) => this.acts.results(node, results) : null));
  }

  /** Drawn once for each answer: a user may have opened it. */
  updateBlend() {
    const found = this.node.usage?.kvilt?.documents;
    this.blend.hidden = !found?.length;
    if (this.blend.hidden || this.blendOf === found) return;
    this.blendOf = found;
    this.blend.replaceChildren(blendMap(found, this.node.blended?.titles ?? []));
  }

  toggleTokens() {
    this.asTokens = !this.asTokens;
    this.signature = null;
    this.update();
  }

  /** How far the prompt is read, or that nothing is known yet. */
  updateWaiting() {
    const { progress } = this.node;
    if (!progress || progress.processed >= progress.total) {
      if (!this.waiting.querySelector('.dots')) {
        const dots = el('span', { class: 'dots' }, el('i'), el('i'), el('i'));
        this.waiting.replaceChildren(dots, el('span', { class: 'unseen' }, 'Waiting for the first word'));
      }
      return;
    }
    const { total, cache, processed } = progress;
    const label = `Reading the prompt: ${count(processed)} of ${tokens(total)}${cache ? `, ${count(cache)} reused` : ''}`;
    const reused = el('span', { class: 'reused' });
    const computed = el('span', { class: 'computed' });
    reused.style.width = `${(100 * cache) / total}%`;
    computed.style.width = `${(100 * (processed - cache)) / total}%`;
    const bar = { class: 'track', role: 'progressbar', 'aria-label': 'Reading the prompt', 'aria-valuemin': 0 };
    this.waiting.replaceChildren(
      el('div', { ...bar, 'aria-valuemax': total, 'aria-valuenow': processed }, reused, computed), el('small', {}, label));
  }

  updateTrouble() {
    const { node } = this;
    const told = node.error ?? (node.state === 'dropped' ? DROPPED : null);
    this.trouble.hidden = !told;
    if (!told || this.told === told) return;
    this.told = told;
    const retry = el('button', { type: 'button', class: 'plain', on: { click: () => this.acts.retry(node) } }, 'Try again');
    this.trouble.replaceChildren(el('p', {}, el('strong', {}, told.what), ' ', told.next), retry);
  }

  updateBar(busy, at, of) {
    const { node } = this;
    const parts = [];
    if (of > 1) parts.push(this.branches(at, of));
    if (node.state !== 'streaming') parts.push(...this.buttons(busy));
    if (node.role === 'assistant') parts.push(this.facts());
    const signature = `${at}/${of} ${node.state} ${busy}`;
    if (signature === this.signature) this.bar.lastChild?.replaceWith(parts.at(-1));
    else this.keepingFocus(() => this.bar.replaceChildren(...parts));
    this.signature = signature;
  }

  /** Build the buttons again; the focus moves from a button to its successor. */
  keepingFocus(change) {
    const label = this.bar.contains(document.activeElement) ? document.activeElement.getAttribute('aria-label') : null;
    change();
    if (label === null) return;
    const same = [...this.bar.querySelectorAll('button')].find((one) => one.getAttribute('aria-label') === label && !one.disabled);
    (same ?? this.element).focus();
  }

  branches(at, of) {
    return el('span', { class: 'branches', role: 'group', 'aria-label': `Branch ${at + 1} of ${of}` },
      iconButton('left', 'Previous branch', () => this.acts.walk(this.node, -1), { disabled: at === 0 }),
      el('span', { class: 'which' }, `${at + 1}/${of}`),
      iconButton('right', 'Next branch', () => this.acts.walk(this.node, 1), { disabled: at === of - 1 }));
  }

  buttons(busy) {
    const { node, acts } = this;
    const copy = iconButton('copy', 'Copy', () => copyText(node.text, copy));
    if (node.role === 'tool') return [];
    if (node.role === 'user') {
      const edit = iconButton('edit', 'Edit as a new branch', () => this.edit(), { disabled: busy });
      return node.text ? [copy, edit] : [edit];
    }
    const again = iconButton('again', 'Regenerate as a new branch', () => acts.regenerate(node), { disabled: busy });
    if (!node.text) return [again];
    const pressed = { 'aria-pressed': this.asTokens ? 'true' : 'false' };
    return [
      copy, again,
      iconButton('many', 'Regenerate several branches at once', () => this.askBranches(), { disabled: busy }),
      iconButton('edit', 'Edit the answer and continue it', () => this.edit(), { disabled: busy }),
      answerTokens(node) ? iconButton('chance', 'Token probabilities', () => this.toggleTokens(), pressed) : null,
      node.blended ? iconButton('check', 'Check this answer', () => acts.check(node), { disabled: busy }) : null,
      this.tree().placeOf(node).of > 1 ? iconButton('sides', 'Compare branches', () => acts.compare(node)) : null,
    ].filter(Boolean);
  }

  /** Ask in the bar how many branches there shall be. */
  askBranches() {
    const input = el('input', { type: 'number', min: 2, max: BRANCHES.most, step: 1, required: true, 'aria-label': 'Branches' });
    input.value = Math.min(BRANCHES.most, Math.max(2, Math.round(local.get('branches', BRANCHES.usual)) || BRANCHES.usual));
    const end = () => {
      this.signature = null;
      this.update();
    };
    const form = el('form', { class: 'cutting' }, input, el('button', { type: 'submit', class: 'plain main' }, 'Regenerate branches'),
      el('button', { type: 'button', class: 'plain', on: { click: () => { end(); this.element.focus(); } } }, 'Cancel'));
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      local.set('branches', input.valueAsNumber);
      end();
      this.acts.regenerate(this.node, input.valueAsNumber);
    });
    form.addEventListener('keydown', (event) => {
      event.stopPropagation();
      if (event.key !== 'Escape') return;
      event.preventDefault();
      end();
      this.element.focus();
    });
    this.bar.replaceChildren(form);
    this.signature = null;
    input.focus();
    input.select();
  }

  /** Speed, time to the first token, and what of the prompt's KV was reused. */
  facts() {
    const { node } = this;
    const { firstS, perSecond } = node.speeds ?? speeds(node);
    const said = [
      perSecond === null ? null : el('span', { title: 'Speed after the first token' }, rate(perSecond)),
      firstS === null ? null : el('span', { title: 'Time to the first token' }, `first token ${seconds(firstS)}`),
      this.fit(),
      ...this.blended(),
      this.reuse(),
      node.state === 'stopped' ? el('span', {}, 'stopped') : null,
      node.finish === 'length' ? el('span', { title: 'The limit of tokens was reached' }, 'cut at max tokens') : null,
    ];
    return el('span', { class: 'facts' }, said.filter(Boolean));
  }

  /** Whether an answer fits the schema that was asked for, also while it is written. */
  fit() {
    const { schema, text, state } = this.node;
    if (!schema || !text) return null;
    const { fits, says } = schemaState(text, schema, state !== 'streaming');
    return el('span', { class: fits ? 'some' : fits === false ? 'bad' : '' }, says);
  }

  /** What blending did, and what a whole prefill would take by the speed at which documents were computed. */
  blended() {
    const { blended, usage } = this.node;
    if (!blended || !usage?.kvilt) return [];
    const { blended_reused: reused, blended_recomputed: again } = usage.kvilt;
    const whole = blended.wholeS ? el('span', { title: 'By the speed at which the documents were computed' }, `about ${seconds(blended.wholeS)} as a whole`) : null;
    return [whole, el('span', { title: `${blended.strategy}, ratio ${blended.ratio}` }, `${count(reused)} of ${tokens(reused + again)} of documents reused`)];
  }

  reuse() {
    if (this.node.blended) return null;
    const { usage, parentKv, miss } = this.node;
    if (!usage) return null;
    const cached = usage.prompt_tokens_details.cached_tokens;
    const from = parentKv ? `Forked from KV handle ${parentKv.id.slice(0, 8)} (${tokens(parentKv.tokens)})` : 'No handle was used';
    const missed = usage.kvilt?.miss;
    const because = missed && missed.expected > cached ? `; ${tokens(missed.expected)} could have been: ${missText(missed)}` : '';
    const why = miss ? `; the handle did not fit${miss.index === null ? '' : ` from token ${miss.index} on`}` : '';
    const text = `${count(cached)} of ${tokens(usage.prompt_tokens)} reused`;
    return el('span', { class: cached ? 'reuse some' : 'reuse', title: `${from}${why}${because}` }, parentKv ? icon('fork') : null, text);
  }

  /** Write the message anew: saving makes a branch beside it. */
  edit() {
    if (this.editing) return;
    this.editing = true;
    const box = el('textarea', { class: 'rewrite', 'aria-label': 'Edit the message', rows: 2 });
    box.value = this.node.text;
    const end = (text) => {
      this.editing = false;
      this.signature = null;
      this.element.classList.remove('editing');
      this.text?.replaceChildren();
      this.update();
      if (text === null) this.element.focus();
      else if (this.node.role === 'assistant') this.acts.resume(this.node, text);
      else this.acts.edit(this.node, text);
    };
    // An answer may be continued as it is; a question that did not change is no branch.
    const changed = () => box.value.trim() && (box.value !== this.node.text || this.node.role === 'assistant');
    const save = () => end(changed() ? box.value : null);
    box.addEventListener('keydown', (event) => {
      if (event.isComposing) return;
      if (event.key === 'Escape') end(null);
      else if (event.key === 'Enter' && !event.shiftKey) save();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const grow = () => {
      box.style.height = 'auto';
      box.style.height = `${box.scrollHeight}px`;
    };
    box.addEventListener('input', grow);
    this.element.classList.add('editing');
    const answers = this.node.role === 'assistant';
    if (answers) this.text.replaceChildren(box);
    else this.body.replaceChildren(box);
    this.text && (this.text.sources = null);
    this.bar.replaceChildren(
      el('button', { type: 'button', class: 'plain', on: { click: () => end(null) } }, 'Cancel'),
      el('button', { type: 'button', class: 'plain main', on: { click: save } }, answers ? 'Continue from here' : 'Send as a branch'));
    grow();
    box.focus();
    box.setSelectionRange(box.value.length, box.value.length);
  }
}

const DROPPED = { what: 'This answer was interrupted.', next: 'What arrived is kept.' };

/** An error as a message keeps it. */
export const told = (error) => advice(error);
