// The key of this tab: asked for when the server wants one, kept until the tab is closed, and nowhere else.

import { byId, el } from './dom.js';
import { session } from './storage.js';

export class Keys {
  constructor() {
    this.key = session.get('key');
    this.dialog = byId('key');
    this.asking = null;
    this.build();
  }

  build() {
    this.input = el('input', { id: 'key-input', type: 'password', autocomplete: 'off', spellcheck: 'false', required: true });
    this.why = el('p', { class: 'why', role: 'alert' });
    this.form = el('form', { method: 'dialog' },
      el('h2', { id: 'key-title' }, 'This server asks for a key'),
      el('p', {}, 'The owner of the server can give you one. It is kept in this tab only, until you close it.'),
      el('div', { class: 'field' }, el('label', { for: 'key-input' }, 'API key'), this.input), this.why,
      el('div', { class: 'row' },
        el('button', { type: 'button', class: 'plain', on: { click: () => this.dialog.close() } }, 'Not now'),
        el('button', { type: 'submit', class: 'plain main' }, 'Use this key')));
    this.dialog.append(this.form);
    this.form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.given = this.input.value.trim();
      this.dialog.close();
    });
    this.dialog.addEventListener('close', () => this.closed());
  }

  current() {
    return this.key;
  }

  forget() {
    this.key = null;
    session.set('key', null);
  }

  /** A key from the user, or null. Concurrent calls share one dialog. */
  ask(why) {
    this.asking ??= new Promise((resolve) => {
      this.answer = resolve;
      this.given = null;
      this.input.value = '';
      this.why.replaceChildren(this.key ? why : '');
      this.dialog.showModal();
    });
    return this.asking;
  }

  closed() {
    if (this.given) {
      this.key = this.given;
      session.set('key', this.key);
    }
    this.answer?.(this.given || null);
    this.asking = null;
  }
}
