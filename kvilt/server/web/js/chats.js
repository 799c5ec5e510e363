// The list of conversations beside the chat: search, rename, delete, export and import.

import { byId, el, icon, iconButton, set } from './dom.js';
import { asJson, asMarkdown, download, fileName, readConversation } from './transfer.js';
import { Tree } from './tree.js';

const when = new Intl.DateTimeFormat('en', { dateStyle: 'medium', timeStyle: 'short' });

export class Chats {
  /** `acts` has open(id), current() and added(tree, title). */
  constructor(library, acts) {
    this.library = library;
    this.acts = acts;
    this.panel = byId('chats');
    this.button = byId('chats-open');
    this.button.addEventListener('click', () => (this.panel.hidden ? this.open() : this.close()));
    this.search = el('input', { type: 'search', class: 'search', placeholder: 'Search conversations', 'aria-label': 'Search conversations' });
    this.search.addEventListener('input', () => this.show());
    this.note = el('p', { class: 'trouble', role: 'alert', hidden: true });
    this.list = el('ul', { class: 'chat-list' });
    this.file = el('input', { type: 'file', accept: '.json,application/json', hidden: true, 'aria-label': 'A conversation to import', tabindex: -1 });
    this.file.addEventListener('change', () => this.take());
    this.panel.append(
      el('div', { class: 'panel-head' }, el('h2', {}, 'Conversations'), iconButton('close', 'Close the conversations', () => this.close())),
      this.search, this.note, this.list,
      el('div', { class: 'row' }, this.file,
        el('button', { type: 'button', class: 'plain', on: { click: () => this.file.click() } }, icon('down'), 'Import')));
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
  show() {
    if (this.panel.hidden || this.list.querySelector('form')) return;
    const found = this.library.search(this.search.value);
    this.list.replaceChildren(...found.map((one) => this.entry(one)));
    if (!found.length) this.list.append(el('li', { class: 'empty' }, this.search.value ? 'Nothing was found.' : 'Nothing is kept yet.'));
  }

  entry(one) {
    const current = one.id === this.acts.current();
    const open = el('button', { type: 'button', class: 'chat-title', 'aria-current': current ? 'true' : null, dir: 'auto', on: { click: () => this.acts.open(one.id) } },
      one.title, el('small', {}, when.format(one.changed)));
    const row = el('li', { 'data-chat': one.id }, open, el('span', { class: 'verbs' },
      iconButton('edit', `Rename ${one.title}`, () => this.rename(row, one)),
      iconButton('save', `Export ${one.title} as JSON`, () => this.export(one, 'json')),
      iconButton('text', `Export ${one.title} as Markdown`, () => this.export(one, 'md')),
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
      this.library.rename(one.id, input.value.trim() || one.title);
      end();
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
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      form.remove();
      this.library.remove(one.id);
      this.acts.removed(one.id);
      this.show();
      this.search.focus();
    });
    row.replaceChildren(form);
    form.querySelector('button').focus();
  }

  export(one, kind) {
    const tree = Tree.from(this.library.load(one.id));
    if (kind === 'json') download(fileName(one.title, 'json'), 'application/json', asJson(tree, one.title));
    else download(fileName(one.title, 'md'), 'text/markdown', asMarkdown(tree, one.title));
  }

  async take() {
    const [file] = this.file.files;
    this.file.value = '';
    if (!file) return;
    try {
      const { tree, title } = readConversation(await file.text());
      this.note.hidden = true;
      this.acts.added(tree, title);
    } catch (error) {
      this.note.hidden = false;
      this.note.replaceChildren(error.message);
    }
    this.show();
  }
}
