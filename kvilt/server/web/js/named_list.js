// A list of named values that this browser keeps, as a row of a form: choose one, keep the current one under a name,
// delete one. Knows neither presets nor system prompts.

import { el } from './dom.js';
import { local } from './storage.js';

export class NamedList {
  /** `key` names the list in the browser; `fixed` are `[name, value]` that cannot be deleted; `read()` is the current
   * value, `choose(value)` takes another one. */
  constructor({ key, label, what, fixed = [], read, choose }) {
    Object.assign(this, { key, fixed, read, choose });
    this.select = el('select', { id: `${key}-choice`, 'aria-label': label });
    this.select.addEventListener('change', () => this.chosen());
    this.name = el('input', { type: 'text', maxlength: 60, 'aria-label': `Name of the ${what}`, placeholder: `Name of the ${what}`, hidden: true });
    this.name.addEventListener('keydown', (event) => this.pressed(event));
    this.keep = el('button', { type: 'button', class: 'plain', on: { click: () => this.keepCurrent() } }, 'Keep');
    this.remove = el('button', { type: 'button', class: 'plain', on: { click: () => this.removeChosen() } }, 'Delete');
    this.keep.setAttribute('aria-label', `Keep as a ${what}`);
    this.remove.setAttribute('aria-label', `Delete the ${what}`);
    this.element = el('div', { class: 'named' }, this.select, this.name, this.keep, this.remove);
  }

  get own() {
    const kept = local.get(this.key, []);
    return Array.isArray(kept) ? kept.filter((one) => Array.isArray(one) && typeof one[0] === 'string') : [];
  }

  /** Draw the list; the entry that equals the current value is chosen. */
  show() {
    const now = JSON.stringify(this.read());
    this.entries = [...this.fixed, ...this.own];
    const at = this.entries.findIndex(([, value]) => JSON.stringify(value) === now);
    const option = (name, i) => el('option', { value: i, selected: i === at }, name);
    this.select.replaceChildren(el('option', { value: -1, selected: at < 0 }, 'Your own'), ...this.entries.map(([name], i) => option(name, i)));
    this.remove.hidden = at < this.fixed.length;
    this.keep.hidden = at >= 0;
    this.name.hidden = true;
  }

  chosen() {
    const entry = this.entries[Number(this.select.value)];
    if (entry) this.choose(entry[1]);
    this.show();
  }

  pressed(event) {
    if (event.key !== 'Enter' && event.key !== 'Escape') return;
    event.preventDefault(); // the form it stands in is another's
    event.stopPropagation();
    if (event.key === 'Enter') this.keepCurrent();
    else this.show();
  }

  /** Ask for a name, then keep the current value under it. */
  keepCurrent() {
    const name = this.name.value.trim();
    if (this.name.hidden || !name) {
      this.name.hidden = false;
      this.name.value = '';
      this.name.focus();
      return;
    }
    local.set(this.key, [...this.own.filter(([other]) => other !== name), [name, this.read()]]);
    this.show();
    this.select.focus();
  }

  removeChosen() {
    const [name] = this.entries[Number(this.select.value)];
    local.set(this.key, this.own.filter(([other]) => other !== name));
    this.show();
    this.select.focus();
  }
}
