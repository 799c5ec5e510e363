// Sampling with presets, system prompts, length, tools and the key, in a dialog. Numbers that make no sense are put
// right, not sent.

import { byId, el } from './dom.js';
import { NamedList } from './named_list.js';
import { readJson } from './schema.js';
import { local } from './storage.js';

const KEYS = [
  ['Enter', 'send'], ['Shift+Enter', 'new line'], ['Esc', 'stop, or leave'],
  ['↑ in an empty box', 'go to the messages'], ['↑ ↓', 'walk messages'], ['← →', 'walk branches'],
  ['Alt+arrows', 'the same from anywhere'], ['E, R, C', 'edit, regenerate, copy'],
];
// Values of the settings, the fields of a request they become, and what they may be; null: as the model asks for.
const SAMPLING = [
  { name: 'topP', field: 'top_p', label: 'Top p', min: 0.01, max: 1, step: 0.01 },
  { name: 'topK', field: 'top_k', label: 'Top k', min: 1, max: 1000, step: 1 },
  { name: 'minP', field: 'min_p', label: 'Min p', min: 0, max: 1, step: 0.01 },
  { name: 'repetition', field: 'repetition_penalty', label: 'Repetition', min: 0.5, max: 2, step: 0.05 },
  { name: 'seed', field: 'seed', label: 'Seed', min: 0, max: 2 ** 31 - 1, step: 1 },
];
const MODELS_OWN = { temperature: null, topP: null, topK: null, minP: null, repetition: null, seed: null };
const DEFAULTS = { ...MODELS_OWN, maxTokens: 512, system: '', probabilities: true, tools: '', schema: '' };
const PRESETS = [
  ['As the model asks for', MODELS_OWN],
  ['Exact', { ...MODELS_OWN, temperature: 0 }],
  ['Balanced', { ...MODELS_OWN, temperature: 0.7, topP: 0.9 }],
  ['Varied', { ...MODELS_OWN, temperature: 1.2, minP: 0.05 }],
];
const PROMPTS = [['None', '']];

/** The settings as they were left. */
export function loaded() {
  const saved = local.get('settings', {});
  return checked({ ...DEFAULTS, ...saved });
}

function checked({ maxTokens, system, probabilities, tools, schema, ...sampling }) {
  const most = Math.floor(Number(maxTokens));
  return {
    ...checkedSampling(sampling),
    maxTokens: Number.isFinite(most) && most > 0 ? Math.min(most, 2 ** 31 - 1) : null, // none: as much as fits
    system: String(system ?? ''),
    probabilities: probabilities !== false,
    tools: String(tools ?? ''),
    schema: String(schema ?? ''),
  };
}

function checkedSampling(given) {
  const between = (value, min, max, step) => {
    const number = value === null || value === undefined || value === '' ? NaN : Number(value);
    if (!Number.isFinite(number)) return null;
    return Math.min(max, Math.max(min, step === 1 ? Math.round(number) : number));
  };
  const rest = SAMPLING.map(({ name, min, max, step }) => [name, between(given[name], min, max, step)]);
  return { temperature: between(given.temperature, 0, 2), ...Object.fromEntries(rest) };
}

export class Settings {
  /** `keys` can be forgotten here. */
  constructor(keys) {
    this.values = loaded();
    this.sampling = {};
    this.keys = keys;
    this.dialog = byId('settings');
    this.inputs();
    this.build();
    this.listen();
  }

  inputs() {
    const number = (id, props) => el('input', { id, type: 'number', inputmode: 'decimal', ...props });
    this.temperature = el('input', { id: 'temperature', type: 'range', min: 0, max: 2, step: 0.05 });
    this.probabilities = el('input', { id: 'probabilities', type: 'checkbox' });
    this.usual = el('input', { id: 'usual', type: 'checkbox' });
    this.shownTemperature = el('output', { for: 'temperature' });
    this.maxTokens = number('max-tokens', { min: 1, step: 1, placeholder: 'as much as fits', inputmode: 'numeric' });
    this.rest = SAMPLING.map((one) => ({ ...one, input: number(one.name, { min: one.min, max: one.max, step: one.step, placeholder: 'default' }) }));
    this.system = el('textarea', { id: 'system', rows: 4, placeholder: "The model's own" });
    this.tools = el('textarea', { id: 'tools', rows: 3, class: 'mono', placeholder: '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]' });
    this.schema = el('textarea', { id: 'schema', rows: 3, class: 'mono', placeholder: '{"type": "object", "properties": {"name": {"type": "string"}}}' });
    this.wrong = el('p', { class: 'why', role: 'alert' });
    this.forget = el('button', { type: 'button', class: 'plain', on: { click: () => this.forgetKey() } }, 'Forget the key');
    this.prompts = new NamedList({
      key: 'prompts', label: 'System prompts', what: 'system prompt', fixed: PROMPTS,
      read: () => this.system.value, choose: (text) => { this.system.value = text; },
    });
    this.presets = new NamedList({
      key: 'presets', label: 'Presets of sampling', what: 'preset', fixed: PRESETS,
      read: () => this.readSampling(), choose: (sampling) => this.writeSampling(checkedSampling(sampling)),
    });
  }

  build() {
    const field = (label, id, input, more) => el('div', { class: 'field' }, el('label', { for: id }, label, more), input);
    this.dialog.append(el('form', { method: 'dialog' },
      el('h2', { id: 'settings-title' }, 'Settings'),
      field('System prompt', 'system', this.system), this.prompts.element,
      field('Sampling', 'presets-choice', this.presets.element),
      field('Temperature ', 'temperature', this.temperature, this.shownTemperature),
      el('label', { class: 'check', for: 'usual' }, this.usual, 'Sample as the model asks for'),
      el('details', { class: 'shortcuts' }, el('summary', {}, 'More of sampling'),
        el('div', { class: 'numbers' }, this.rest.map(({ name, label, input }) => field(label, name, input)))),
      el('label', { class: 'check', for: 'probabilities' }, this.probabilities, 'Ask for the probabilities of tokens'),
      field('Max tokens of an answer', 'max-tokens', this.maxTokens),
      el('details', { class: 'shortcuts' }, el('summary', {}, 'Tools and JSON'),
        field('Tools, whose calls you answer by hand', 'tools', this.tools), field('JSON schema of answers', 'schema', this.schema), this.wrong),
      el('details', { class: 'shortcuts' }, el('summary', {}, 'Keyboard'),
        el('dl', {}, KEYS.flatMap(([key, does]) => [el('dt', {}, key), el('dd', {}, does)]))),
      el('div', { class: 'row' }, this.forget, el('button', { type: 'submit', class: 'plain main' }, 'Done'))));
  }

  listen() {
    this.temperature.addEventListener('input', () => {
      this.usual.checked = false;
      this.showSampling();
    });
    this.usual.addEventListener('change', () => {
      if (this.usual.checked) this.writeSampling(MODELS_OWN);
      this.showSampling();
    });
    for (const { input } of this.rest) input.addEventListener('change', () => this.showSampling());
    this.system.addEventListener('input', () => this.prompts.show());
    for (const box of [this.tools, this.schema]) box.addEventListener('input', () => this.checkJson());
    this.dialog.addEventListener('close', () => this.take()); // Escape
    this.dialog.addEventListener('click', (event) => event.target === this.dialog && this.leave());
    this.dialog.querySelector('form').addEventListener('submit', (event) => {
      event.preventDefault();
      this.leave();
    });
  }

  /** What the model's author, or kvilt, samples with: the fields of a request. */
  setDefaults(sampling) {
    this.sampling = sampling ?? {};
  }

  /** The fields of a request that say how tokens are drawn. */
  get drawn() {
    const own = SAMPLING.filter(({ name }) => this.values[name] !== null).map(({ name, field }) => [field, this.values[name]]);
    const base = this.values.temperature === null ? this.sampling : { temperature: this.values.temperature };
    return { ...base, ...Object.fromEntries(own) };
  }

  readSampling() {
    const rest = this.rest.map(({ name, input }) => [name, input.value]);
    return checkedSampling({ temperature: this.usual.checked ? null : this.temperature.value, ...Object.fromEntries(rest) });
  }

  writeSampling(sampling) {
    this.usual.checked = sampling.temperature === null;
    if (sampling.temperature !== null) this.temperature.value = sampling.temperature;
    for (const { name, input } of this.rest) input.value = sampling[name] ?? '';
    this.showSampling();
  }

  /** Say at once which of the two is no JSON. */
  checkJson() {
    const wrong = [['Tools', this.tools], ['The schema', this.schema]].map(([name, box]) => [name, readJson(box.value).error]).find(([, error]) => error);
    this.wrong.replaceChildren(wrong ? `${wrong[0]}: ${wrong[1]}. It is not sent.` : '');
  }

  showSampling() {
    if (this.usual.checked) this.temperature.value = this.sampling.temperature ?? 1;
    const how = Object.entries(this.sampling).map(([name, value]) => `${name.replaceAll('_', ' ')} ${value}`).join(', ');
    this.shownTemperature.replaceChildren(this.usual.checked ? how || 'temperature 1' : this.temperature.value);
    this.presets.show();
  }

  open() {
    this.probabilities.checked = this.values.probabilities;
    this.writeSampling(this.values);
    this.maxTokens.value = this.values.maxTokens ?? '';
    this.system.value = this.values.system;
    this.prompts.show();
    this.tools.value = this.values.tools;
    this.schema.value = this.values.schema;
    this.checkJson();
    this.forget.hidden = !this.keys.current();
    this.dialog.showModal();
  }

  /** Close with what was entered. The browser's own event comes later, and input that follows may overtake it. */
  leave() {
    this.take();
    this.dialog.close();
  }

  take() {
    const rest = { maxTokens: this.maxTokens.value, system: this.system.value, probabilities: this.probabilities.checked, tools: this.tools.value, schema: this.schema.value };
    this.values = checked({ ...this.readSampling(), ...rest });
    local.set('settings', this.values);
  }

  forgetKey() {
    this.keys.forget();
    this.forget.hidden = true;
  }
}
