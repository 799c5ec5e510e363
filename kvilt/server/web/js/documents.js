// The documents of a conversation: chips with their tokens, and how much of them is computed again.

import { byId, el, icon, iconButton } from './dom.js';
import { fileDocument } from './file_text.js';
import { count, tokens } from './numbers.js';

const STRATEGIES = ['query', 'head', 'deviation'];
const USUAL = { ratio: 0.15, strategy: 'query' };

export class Documents {
  /** `tree` returns the conversation; `onChange` hears of documents that came or went; `complain` shows an error. */
  constructor(api, tree, onChange, complain) {
    Object.assign(this, { api, tree, onChange, complain });
    this.holder = byId('documents');
    this.tokensPerS = null; // of documents that were computed here: what a prefill takes
    this.file = el('input', { type: 'file', multiple: true, hidden: true, 'aria-label': 'Documents', tabindex: -1, accept: 'text/*,.pdf,.md,.txt,.html,.htm,.csv,.json,.py,.js,.rst' });
    this.file.addEventListener('change', () => this.take([...this.file.files]));
    const attach = byId('attach');
    attach.append(icon('clip'));
    attach.addEventListener('click', () => this.file.click());
    byId('composer').append(this.file);
    this.listen(document.querySelector('.chat'));
  }

  listen(area) {
    area.addEventListener('dragover', (event) => event.dataTransfer.types.includes('Files') && event.preventDefault());
    area.addEventListener('drop', (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.take([...event.dataTransfer.files]);
    });
    byId('prompt').addEventListener('paste', (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.take([...event.clipboardData.files]);
    });
  }

  get all() {
    return (this.tree().documents ??= []);
  }

  get blend() {
    return { ...USUAL, ...this.tree().blend };
  }

  /** The fields of a request; none without documents. */
  fields() {
    if (!this.all.length) return null;
    return { documents: this.all.map(({ title, text }) => ({ title, text })), blend: this.blend };
  }

  async take(files) {
    this.file.value = '';
    for (const file of files) {
      try {
        const document = { ...(await fileDocument(file, this.api)), state: 'computing' };
        this.all.push(document);
        this.render();
        await this.warm(document);
      } catch (error) {
        this.complain(error);
      }
    }
    this.onChange();
  }

  /** Compute a document's KV now, so that the first question with it does not wait for it. */
  async warm(document) {
    const asked = performance.now();
    try {
      const model = this.model ? { model: this.model } : {};
      const { data } = await this.api.call('POST', 'v1/kv/chunks', { documents: [{ title: document.title, text: document.text }], ...model });
      const [{ tokens: n, found }] = data;
      Object.assign(document, { tokens: n, state: found ? 'found' : 'computed' });
      if (!found) this.tokensPerS = n / ((performance.now() - asked) / 1000);
    } catch (error) {
      document.state = 'failed';
      throw error;
    } finally {
      this.render();
    }
  }

  remove(document) {
    this.tree().documents = this.all.filter((one) => one !== document);
    this.render();
    this.onChange();
  }

  render() {
    this.holder.hidden = !this.all.length;
    if (!this.all.length) return this.holder.replaceChildren();
    return this.holder.replaceChildren(el('ul', { class: 'chips', 'aria-label': 'Documents' }, this.all.map((one) => this.chip(one))), this.recipe());
  }

  chip(one) {
    const said = { computing: 'computing…', computed: `${tokens(one.tokens ?? 0)}, warm`, found: `${tokens(one.tokens ?? 0)}, was warm`, failed: 'not computed' }[one.state] ?? '';
    return el('li', { class: `chip ${one.state}` }, el('span', { class: 'chip-title', title: one.title }, one.title), el('small', {}, said),
      iconButton('close', `Remove ${one.title}`, () => this.remove(one)));
  }

  recipe() {
    const { ratio, strategy } = this.blend;
    const change = (fields) => {
      this.tree().blend = { ...this.blend, ...fields };
      this.onChange();
    };
    const shown = el('output', { for: 'ratio' }, `${Math.round(ratio * 100)} %`);
    const slider = el('input', { id: 'ratio', type: 'range', min: 0, max: 100, step: 5, 'aria-label': 'Share of the documents that is computed again' });
    slider.value = Math.round(ratio * 100);
    slider.addEventListener('input', () => {
      shown.replaceChildren(`${slider.value} %`);
      change({ ratio: Number(slider.value) / 100 });
    });
    const choice = el('select', { id: 'strategy', 'aria-label': 'Which tokens are computed again' }, STRATEGIES.map((name) => el('option', { selected: name === strategy }, name)));
    choice.addEventListener('change', () => change({ strategy: choice.value }));
    const all = this.all.reduce((sum, one) => sum + (one.tokens ?? 0), 0);
    return el('div', { class: 'recipe' }, el('span', {}, `${count(all)} tokens of documents, computed again:`), slider, shown, choice);
  }
}
