// The list of conversations beside the chat: search, rename, delete, export and import.

import { byId, el, icon, iconButton, set } from './dom.js';
import { asJson, asMarkdown, asSession, download, fileName, readConversation, readSession } from './transfer.js';

const when = new Intl.DateTimeFormat('en', { dateStyle: 'medium', timeStyle: 'short' });

export class Chats {
  /** `acts` has open(id), current(), which is the open conversation, added(tree, title) and removed(id). */
  constructor(api, library, acts) {
    Object.assign(this, { api, library, acts });
    this.panel = byId('chats');
    this.button = byId('chats-open');
    this.button.addEventListener('click', () => (this.panel.hidden ? this.open() : this.close()));
    this.search = el('input', { type: 'search', class: 'search', placeholder: 'Search conversations', 'aria-label': 'Search conversations' });
    this.search.addEventListener('input', () => this.show());
    this.note = el('p', { class: 'trouble', role: 'alert', hidden: true });
    this.told = el('p', { class: 'told', role: 'status', hidden: true });
    this.where = el('p', { class: 'where' });
    this.list = el('ul', { class: 'chat-list' });
    this.file = el('input', { type: 'file', accept: '.json,.kvs,application/json', hidden: true, 'aria-label': 'A conversation to import', tabindex: -1 });
    this.file.addEventListener('change', () => this.take());
    this.panel.append(
      el('div', { class: 'panel-head' }, el('h2', {}, 'Conversations'), iconButton('close', 'Close the conversations', () => this.close())),
      this.search, this.note, this.told, this.list,
      el('div', { class: 'row' }, this.file,
        el('button', { type: 'button', class: 'plain', on: { click: () => this.file.click() } }, icon('down'), 'Import')), this.where);
  }

  open() {
    this.panel.hidden = false;
    set(this.button, 'aria-expanded', 'true');
    this.show();
    this.search.focus();
  }

  close() {
    this.panel.hidden = true;
    set(this.button, 'aria-expanded', 'false');
    this.button.focus();
  }

  contains(element) {
    return this.panel.contains(element);
  }

  /** Draw the list again; nothing while the panel is closed or a title is written. */
  async show() {
    if (this.panel.hidden) return;
    const words = this.search.value;
    let found;
    try {
      found = await this.library.find(words);
    } catch (error) {
      this.complain(error);
      return;
    }
    if (this.list.querySelector('form') || words !== this.search.value) return;
    this.where.replaceChildren(this.library.onServer ? 'Kept on the server, for your key.' : 'Kept in this browser.');
    this.list.replaceChildren(...found.map((one) => this.entry(one)));
    if (!found.length) this.list.append(el('li', { class: 'empty' }, this.search.value ? 'Nothing was found.' : 'Nothing is kept yet.'));
  }

  entry(one) {
    const current = one.id === this.acts.current().id;
    const where = one.here && this.library.onServer ? ', in this browser only' : '';
    const open = el('button', { type: 'button', class: 'chat-title', 'aria-current': current ? 'true' : null, dir: 'auto', on: { click: () => this.acts.open(one.id) } },
      one.title, el('small', {}, `${when.format(one.changed)}${where}`));
    const row = el('li', { 'data-chat': one.id }, open, el('span', { class: 'verbs' },
      iconButton('edit', `Rename ${one.title}`, () => this.rename(row, one)),
      iconButton('save', `Export ${one.title} as JSON`, () => this.export(one, 'json')),
      iconButton('text', `Export ${one.title} as Markdown`, () => this.export(one, 'md')),
      current ? iconButton('layers', `Export ${one.title} with its KV`, () => this.export(one, 'kvs')) : null,
      iconButton('bin', `Delete ${one.title}`, () => this.remove(row, one))));
    return row;
  }

  rename(row, one) {
    const input = el('input', { 'aria-label': 'Title', required: true, maxlength: 200 });
    input.value = one.title;
    const form = el('form', { class: 'cutting' }, input, el('button', { type: 'submit', class: 'plain main' }, 'Rename'));
    const end = () => {
      form.remove();
      this.show();
    };
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.library.rename(one.id, input.value.trim() || one.title).then(end, (error) => { end(); this.complain(error); });
    });
    form.addEventListener('keydown', (event) => {
      if (event.key !== 'Escape') return;
      event.preventDefault();
      end();
    });
    row.replaceChildren(form);
    input.focus();
    input.select();
  }

  /** Asked in the row itself: what is deleted is gone. */
  remove(row, one) {
    const form = el('form', { class: 'cutting' }, el('span', {}, 'Delete it for good?'),
      el('button', { type: 'submit', class: 'plain main' }, 'Delete'),
      el('button', { type: 'button', class: 'plain', on: { click: () => { form.remove(); this.show(); } } }, 'Keep'));
    form.addEventListener('submit', async (event) => {
      event.preventDefault();
      form.remove();
      this.search.focus();
      await this.library.remove(one.id).catch((error) => this.complain(error));
      this.acts.removed(one.id);
      this.show();
    });
    row.replaceChildren(form);
    form.querySelector('button').focus();
  }

  async export(one, kind) {
    this.note.hidden = true;
    try {
      const open = this.acts.current();
      const tree = one.id === open.id ? open : await this.library.load(one.id);
      const [type, make] = {
        json: ['application/json', () => asJson(tree, one.title)],
        md: ['text/markdown', () => asMarkdown(tree, one.title)],
        kvs: ['application/octet-stream', () => asSession(this.api, tree, one.title)],
      }[kind];
      download(fileName(one.title, kind), type, await make());
    } catch (error) {
      this.complain(error);
    }
  }

  complain(error) {
    this.note.hidden = false;
    this.note.replaceChildren(error.message);
  }

  async take() {
    const [file] = this.file.files;
    this.file.value = '';
    if (!file) return;
    this.note.hidden = true;
    this.told.hidden = true;
    try {
      const { tree, title, kv, why } = file.name.endsWith('.kvs') ? await readSession(this.api, file) : readConversation(await file.text());
      await this.acts.added(tree, title);
      this.told.hidden = !kv;
      this.told.replaceChildren({ used: 'The KV of the file is used.', recomputed: `The KV is computed again: ${why}`, none: 'The file has no KV.' }[kv] ?? '');
    } catch (error) {
      this.complain(error);
    }
    this.show();
  }
}
