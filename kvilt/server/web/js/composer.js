// The box one writes in. Enter sends; the button sends, or stops while an answer is on its way.

import { byId, icon, set } from './dom.js';

export class Composer {
  constructor({ send, stop }) {
    this.form = byId('composer');
    this.box = byId('prompt');
    this.button = byId('send');
    this.send = send;
    this.stop = stop;
    this.form.addEventListener('submit', (event) => this.submitted(event));
    this.box.addEventListener('input', () => this.changed());
    this.box.addEventListener('keydown', (event) => this.pressed(event));
    this.setBusy(false);
  }

  submitted(event) {
    event.preventDefault();
    if (this.busy) this.stop();
    else this.go();
  }

  pressed(event) {
    // While letters are being composed, Enter chooses one.
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.busy) this.go();
  }

  go() {
    const text = this.box.value;
    if (!text.trim()) return;
    this.box.value = '';
    this.changed();
    this.send(text);
  }

  setBusy(busy) {
    this.busy = busy;
    this.button.replaceChildren(icon(busy ? 'stop' : 'send'));
    this.button.classList.toggle('stops', busy);
    set(this.button, 'aria-label', busy ? 'Stop' : 'Send');
    set(this.button, 'title', busy ? 'Stop (Esc)' : 'Send (Enter)');
    this.changed();
  }

  changed() {
    this.button.disabled = !this.busy && !this.box.value.trim();
    this.box.style.height = 'auto';
    this.box.style.height = `${this.box.scrollHeight}px`;
  }

  get empty() {
    return this.box.value === '';
  }

  focus() {
    this.box.focus();
  }
}
