// Temperature, length, system prompt and key, in a dialog. Numbers that make no sense are put right, not sent.

import { byId, el } from './dom.js';
import { readJson } from './schema.js';
import { local } from './storage.js';

const DEFAULTS = { temperature: null, maxTokens: 512, system: '', probabilities: true, tools: '', schema: '' }; // temperature null: as the model's author, or kvilt, has it
const KEYS = [
  ['Enter', 'send'], ['Shift+Enter', 'new line'], ['Esc', 'stop, or leave'],
  ['↑ in an empty box', 'go to the messages'], ['↑ ↓', 'walk messages'], ['← →', 'walk branches'],
  ['Alt+arrows', 'the same from anywhere'], ['E, R, C', 'edit, regenerate, copy'],
];

/** The settings as they were left. */
export function loaded() {
  const saved = local.get('settings', {});
  return checked({ ...DEFAULTS, ...saved });
}

function checked({ temperature, maxTokens, system, probabilities, tools, schema }) {
  const t = temperature === null || temperature === '' ? NaN : Number(temperature);
  const most = Math.floor(Number(maxTokens));
  return {
    temperature: Number.isFinite(t) ? Math.min(2, Math.max(0, t)) : DEFAULTS.temperature,
    maxTokens: Number.isFinite(most) && most > 0 ? Math.min(most, 2 ** 31 - 1) : null, // none: as much as fits
    system: String(system ?? ''),
    probabilities: probabilities !== false,
    tools: String(tools ?? ''),
    schema: String(schema ?? ''),
  };
}

export class Settings {
  /** `keys` can be forgotten here; `onChange` hears of new values. */
  constructor(keys) {
    this.values = loaded();
    this.sampling = {};
    this.keys = keys;
    this.dialog = byId('settings');
    this.build();
  }

  build() {
    const number = (id, props) => el('input', { id, type: 'number', ...props });
    this.temperature = el('input', { id: 'temperature', type: 'range', min: 0, max: 2, step: 0.05 });
    this.probabilities = el('input', { id: 'probabilities', type: 'checkbox' });
    this.usual = el('input', { id: 'usual', type: 'checkbox' });
    this.shownTemperature = el('output', { for: 'temperature' });
    this.maxTokens = number('max-tokens', { min: 1, step: 1, placeholder: 'as much as fits', inputmode: 'numeric' });
    this.system = el('textarea', { id: 'system', rows: 4, placeholder: "The model's own" });
    this.tools = el('textarea', { id: 'tools', rows: 3, class: 'mono', placeholder: '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]' });
    this.schema = el('textarea', { id: 'schema', rows: 3, class: 'mono', placeholder: '{"type": "object", "properties": {"name": {"type": "string"}}}' });
    this.wrong = el('p', { class: 'why', role: 'alert' });
    this.forget = el('button', { type: 'button', class: 'plain', on: { click: () => this.forgetKey() } }, 'Forget the key');
    const field = (label, id, input, more) => el('div', { class: 'field' }, el('label', { for: id }, label, more), input);
    this.dialog.append(el('form', { method: 'dialog' },
      el('h2', { id: 'settings-title' }, 'Settings'),
      field('System prompt', 'system', this.system),
      field('Temperature ', 'temperature', this.temperature, this.shownTemperature),
      el('label', { class: 'check', for: 'usual' }, this.usual, 'Sample as the model asks for'),
      el('label', { class: 'check', for: 'probabilities' }, this.probabilities, 'Ask for the probabilities of tokens'),
      field('Max tokens of an answer', 'max-tokens', this.maxTokens),
      el('details', { class: 'shortcuts' }, el('summary', {}, 'Tools and JSON'),
        field('Tools, whose calls you answer by hand', 'tools', this.tools), field('JSON schema of answers', 'schema', this.schema), this.wrong),
      el('details', { class: 'shortcuts' }, el('summary', {}, 'Keyboard'),
        el('dl', {}, KEYS.flatMap(([key, does]) => [el('dt', {}, key), el('dd', {}, does)]))),
      el('div', { class: 'row' }, this.forget, el('button', { type: 'submit', class: 'plain main' }, 'Done'))));
    this.temperature.addEventListener('input', () => {
      this.usual.checked = false;
      this.showTemperature();
    });
    this.usual.addEventListener('change', () => this.showTemperature());
    for (const box of [this.tools, this.schema]) box.addEventListener('input', () => this.checkJson());
    this.dialog.addEventListener('close', () => this.take());
    this.dialog.addEventListener('click', (event) => event.target === this.dialog && this.dialog.close());
    this.dialog.querySelector('form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.dialog.close();
    });
  }

  /** What the model's author, or kvilt, samples with: the fields of a request. */
  setDefaults(sampling) {
    this.sampling = sampling ?? {};
  }

  /** The fields of a request that say how tokens are drawn. */
  get drawn() {
    return this.values.temperature === null ? this.sampling : { temperature: this.values.temperature };
  }

  /** Say at once which of the two is no JSON. */
  checkJson() {
    const wrong = [['Tools', this.tools], ['The schema', this.schema]].map(([name, box]) => [name, readJson(box.value).error]).find(([, error]) => error);
    this.wrong.replaceChildren(wrong ? `${wrong[0]}: ${wrong[1]}. It is not sent.` : '');
  }

  showTemperature() {
    if (this.usual.checked) this.temperature.value = this.sampling.temperature ?? 1;
    const how = Object.entries(this.sampling).map(([name, value]) => `${name.replaceAll('_', ' ')} ${value}`).join(', ');
    this.shownTemperature.replaceChildren(this.usual.checked ? how || 'temperature 1' : this.temperature.value);
  }

  open() {
    const { temperature, maxTokens, system } = this.values;
    this.usual.checked = temperature === null;
    this.probabilities.checked = this.values.probabilities;
    if (temperature !== null) this.temperature.value = temperature;
    this.showTemperature();
    this.maxTokens.value = maxTokens ?? '';
    this.system.value = system;
    this.tools.value = this.values.tools;
    this.schema.value = this.values.schema;
    this.checkJson();
    this.forget.hidden = !this.keys.current();
    this.dialog.showModal();
  }

  take() {
    this.values = checked({ temperature: this.usual.checked ? null : this.temperature.value, maxTokens: this.maxTokens.value, system: this.system.value, probabilities: this.probabilities.checked, tools: this.tools.value, schema: this.schema.value });
    local.set('settings', this.values);
  }

  forgetKey() {
    this.keys.forget();
    this.forget.hidden = true;
  }
}
