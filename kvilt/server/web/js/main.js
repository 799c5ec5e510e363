// Puts the page together: one conversation, one answer at a time.

import { advice, Told } from './advice.js';
import { Api } from './api.js';
import { ask, conversation, requestBody, speeds } from './ask.js';
import { checkAnswer } from './check.js';
import { Chats } from './chats.js';
import { compare } from './compare.js';
import { Composer } from './composer.js';
import { Documents } from './documents.js';
import { byId, el, icon, set } from './dom.js';
import { Gauge } from './gauge.js';
import { HandleBook } from './handles.js';
import { Inspector } from './inspector.js';
import { Keys } from './key.js';
import { listen } from './keyboard.js';
import { Library } from './library.js';
import { told } from './message.js';
import { Settings } from './settings.js';
import { local, session } from './storage.js';
import { Tabs } from './tabs.js';
import { themeButton } from './theme.js';
import { Thread } from './thread.js';
import { answerTokens, drawnToken, textOf } from './tokens.js';
import { Tree } from './tree.js';

class App {
  constructor() {
    this.keys = new Keys();
    this.api = new Api(this.keys);
    this.library = new Library(this.api, (error) => this.notify(error), (tree) => this.merged(tree));
    this.tabs = new Tabs();
    this.tree = this.firstTree();
    this.models = [];
    this.running = null;
    this.lastRequest = null;
    const tree = () => this.tree;
    this.book = new HandleBook(this.api, tree);
    this.book.used = session.get('handles', []);
    this.acts = {
      start: (text) => this.send(text),
      edit: (node, text) => this.branch(node, text),
      regenerate: (node, n) => this.regenerate(node, n),
      fork: (node, index, token) => this.fork(node, index, token),
      resume: (node, text) => this.resume(node, text),
      check: (node) => this.check(node),
      results: (node, results) => this.answer(this.tree.add(node, 'tool', '', { results })),
      compare: (node) => compare(this.tree, node, (chosen) => this.pick(chosen)),
      retry: (node) => this.retry(node),
      walk: (node, by) => this.walk(node, by),
    };
    this.thread = new Thread(tree, this.acts);
    this.composer = new Composer({ send: (text) => this.send(text), stop: () => this.stop() });
    this.gauge = new Gauge(byId('gauge'));
    this.settings = new Settings(this.keys);
    this.documents = new Documents(this.api, tree, () => this.save(), (error) => this.notify(error));
    this.chats = new Chats(this.api, this.library, {
      open: (id) => this.openChat(id),
      current: tree,
      added: (tree, title) => this.addChat(tree, title),
      removed: (id) => id === this.tree.id && this.restart(false),
    });
    this.inspector = new Inspector({ api: this.api, book: this.book, tree, last: () => this.lastRequest });
    this.buttons();
    listen(this);
    addEventListener('pagehide', () => {
      this.save();
      this.library.keep(this.tree);
      this.library.flush();
    });
    addEventListener('hashchange', () => this.followLink(linked()));
    this.composer.focus();
  }

  buttons() {
    const dress = (id, name, label) => {
      const button = byId(id);
      button.append(icon(name));
      set(button, 'aria-label', label);
      set(button, 'title', label);
      return button;
    };
    dress('chats-open', 'list', 'Conversations');
    dress('new-chat', 'plus', 'New chat').addEventListener('click', () => this.restart());
    dress('settings-open', 'sliders', 'Settings').addEventListener('click', () => this.settings.open());
    dress('inspect', 'layers', 'KV inspector');
    themeButton(byId('theme'));
  }

  /** The conversation that the address names, else the one this tab had. */
  firstTree() {
    const named = linked();
    const had = session.get('chat');
    return (named && had?.id !== named && this.library.loadHere(named)) || Tree.from(had);
  }

  /** Open the conversation that a link names; of the one that is open, take in what other pages have added. */
  async followLink(id) {
    if (!id) return;
    try {
      const found = await this.library.load(id);
      if (id !== this.tree.id && found) this.show(found);
      else if (id !== this.tree.id) this.notify(new Told('The conversation of this link is not kept here.'));
      else if (found && found.revision !== this.tree.revision && !this.busy) this.takeIn(found);
    } catch (error) {
      this.notify(error);
    }
  }

  takeIn(found) {
    this.tree.merge(found);
    this.tree.revision = found.revision;
    this.render();
  }

  merged(tree) {
    if (tree === this.tree && !this.busy) this.render();
  }

  /** Give back what closed tabs held. A copied tab has the messages of the first, not its handles. */
  async tidy() {
    if (await this.tabs.enter()) {
      for (const id of this.book.used) this.book.forget(id);
    }
    for (const id of await this.tabs.left()) this.book.drop(id);
    this.save();
  }

  async openChat(id) {
    if (id === this.tree.id) return;
    try {
      await this.library.flush();
      const found = await this.library.load(id);
      if (found) this.show(found);
    } catch (error) {
      this.notify(error);
    }
  }

  async addChat(tree, title) {
    this.library.keep(tree);
    await this.library.rename(tree.id, title);
    this.show(tree);
  }

  get busy() {
    return this.running !== null;
  }

  /** Find out what is served; until then messages can be written, not sent. */
  async begin() {
    this.render();
    const link = linked();
    try {
      const { data } = await this.api.call('GET', 'v1/models');
      this.models = data;
      this.showModels();
      this.notify(null);
      await this.library.begin();
      await this.followLink(link ?? (this.tree.revision ? this.tree.id : null));
    } catch (error) {
      this.notify(error, () => this.begin());
    }
    this.render();
    this.tidy();
  }

  showModels() {
    const names = this.models.map((one) => one.id);
    document.title = names.length ? `${names[0]} · kvilt` : 'kvilt';
    this.settings.setDefaults(this.model?.sampling_defaults);
    if (names.length === 1) return byId('model').replaceChildren(el('span', { title: names[0] }, names[0]));
    const had = local.get('model');
    const options = this.models.map(({ id, parent }) => el('option', { value: id, selected: id === had }, parent ? `${id} (adapter)` : id));
    const choice = el('select', { 'aria-label': 'Model', on: { change: () => this.chooseModel() } }, options);
    byId('model').replaceChildren(choice);
    return this.chooseModel();
  }

  /** Answers from here on are the chosen model's, or adapter's; what was computed by another one is not reused. */
  chooseModel() {
    local.set('model', this.model.id);
    this.api.model = 'loaded' in this.model ? this.model.parent ?? this.model.id : null;
    document.title = `${this.model.id} · kvilt`;
    this.settings.setDefaults(this.model.sampling_defaults);
    this.documents.model = this.model.id;
    this.render();
  }

  get model() {
    const chosen = byId('model').querySelector('select')?.value;
    return this.models.find((one) => one.id === chosen) ?? this.models[0] ?? null;
  }

  render() {
    this.documents.render();
    this.thread.render(this.busy);
    const answered = this.tree.path().findLast((node) => node.usage);
    this.gauge.show(answered?.usage, this.model?.max_model_len);
  }

  /** An error that belongs to no message; null takes it away. */
  notify(error, retry) {
    const box = byId('notice');
    box.hidden = error === null;
    if (error === null) return;
    const { what, next } = advice(error);
    const again = el('button', { type: 'button', class: 'plain', on: { click: retry ?? (() => this.notify(null)) } }, retry ? 'Try again' : 'Close');
    box.replaceChildren(el('p', {}, el('strong', {}, what), ' ', next), again);
  }

  send(text) {
    if (this.busy) return;
    const parent = this.tree.last ?? this.tree.root;
    this.thread.goToEnd();
    this.answer(this.tree.add(parent, 'user', text));
    this.composer.focus();
  }

  branch(node, text) {
    this.answer(this.tree.add(this.tree.parent(node), 'user', text));
    this.composer.focus();
  }

  /** Answers beside this one, `n` of them at once; the first of them is shown. */
  regenerate(node, n = 1) {
    if (this.busy) return;
    const stood = this.thread.standing(node);
    const question = this.tree.parent(node);
    const nodes = Array.from({ length: n }, () => this.tree.add(question, 'assistant', ''));
    question.shown = question.children.indexOf(nodes[0].id);
    this.answer(question, nodes);
    this.thread.stand(nodes[0], stood);
  }

  /** A branch that has another token at a place of this answer, and goes on from there. */
  fork(node, index, token) {
    const before = answerTokens(node).tokens.slice(0, index);
    const kept = [...before, { ...token, top: node.tokens[index].top }];
    const length = (node.questionTokens ?? Infinity) + index;
    this.continued(node, textOf(kept), kept, length);
  }

  /** A branch with a text of the user's, which the model goes on with. */
  resume(node, text) {
    this.continued(node, text, null, node.questionTokens);
  }

  continued(node, text, tokens, length) {
    if (this.busy) return;
    const question = this.tree.parent(node);
    const resume = node.kv && node.model === this.model?.id && length <= node.kv.tokens ? { kv: node.kv.id, length } : null;
    const made = this.tree.add(question, 'assistant', text, { continued: true, tokens, resume, questionTokens: node.questionTokens });
    this.answer(question, [made]);
  }

  pick(node) {
    const parent = this.tree.parent(node);
    parent.shown = parent.children.indexOf(node.id);
    this.render();
    this.save();
  }

  /** In the place of an answer that has nothing to keep, or else beside it. */
  retry(node) {
    if (node.text) return this.regenerate(node);
    Object.assign(node, { text: '', reasoning: null, error: null, usage: null, progress: null, finish: null, speeds: null, tokens: null });
    return this.answer(this.tree.parent(node), [node]);
  }

  /** What a request is made of, besides the question. */
  given() {
    return { api: this.api, book: this.book, tree: this.tree, model: this.model?.id, settings: this.settings.values, drawn: this.settings.drawn };
  }

  /** Compute the prompt of a blended answer as a whole, and say how far the two are apart. */
  async check(node) {
    if (this.busy || !this.documents.fields()) return;
    const running = { nodes: [], control: new AbortController() };
    this.setRunning(running);
    try {
      const { seed, ratio, strategy } = node.blended;
      const body = requestBody(this.given(), this.tree.parent(node), [{ text: '' }]);
      Object.assign(body, this.documents.fields(), { seed, blend: { ratio, strategy }, kv_out: false, logprobs: true, top_logprobs: 20 });
      node.checked = await checkAnswer(this.api, body, node, drawnToken, running.control.signal);
    } catch (error) {
      if (!running.control.signal.aborted) this.notify(error);
    }
    this.setRunning(null);
    this.save();
  }

  async answer(question, nodes = [this.tree.add(question, 'assistant', '')]) {
    if (this.busy) return;
    for (const node of nodes) node.state = 'streaming';
    const { tree } = this;
    const running = { nodes, control: new AbortController() };
    this.setRunning(running);
    let ended = { state: 'done', error: null };
    try {
      await ask({ ...this.given(), documents: this.documents.fields() }, question, nodes, () => this.changed(nodes), running.control.signal);
    } catch (error) {
      const stopped = running.control.signal.aborted;
      ended = { state: stopped ? 'stopped' : 'failed', error: stopped ? null : told(error) };
    }
    for (const node of nodes) Object.assign(node, ended);
    if (tree === this.tree) this.finished(question, nodes);
  }

  /** At most once a frame, however fast tokens come. */
  changed(nodes) {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      if (nodes[0].state !== 'streaming') return;
      for (const node of nodes) this.thread.refresh(node);
      this.gauge.show(nodes[0].usage, this.model?.max_model_len);
    });
  }

  finished(question, nodes) {
    const [node] = nodes;
    for (const one of nodes) {
      one.speeds = speeds(one);
      one.resume = null;
      if (!one.continued) one.questionTokens = one.usage?.prompt_tokens;
      if (one.blended && this.documents.tokensPerS) one.blended.wholeS = (one.usage?.prompt_tokens ?? 0) / this.documents.tokensPerS;
    }
    if (node.usage) {
      const messages = conversation(this.tree.upTo(question), this.settings.values);
      this.lastRequest = { messages, usage: node.usage, titles: node.blended?.titles };
    }
    byId('status').textContent = { done: 'Answer complete', stopped: 'Stopped', failed: 'The answer failed' }[node.state];
    this.setRunning(null);
    this.save();
    this.inspector.refresh();
  }

  setRunning(running) {
    this.running = running;
    this.composer.setBusy(running !== null);
    this.render();
  }

  stop() {
    this.running?.control.abort();
  }

  walk(node, by) {
    const stood = this.thread.standing(node);
    if (!this.tree.walk(node, by)) return;
    this.render();
    const { children, shown } = this.tree.parent(node);
    this.thread.stand(this.tree.nodes.get(children[shown]), stood);
    this.save();
  }

  /** A new conversation; the old one stays in the list, its KV is given back. */
  restart(keep = true) {
    if (keep) this.save();
    this.show(new Tree());
    this.composer.focus();
  }

  /** Show another conversation. Handles belong to the one that is left. */
  show(tree) {
    this.stop();
    this.running = null;
    this.composer.setBusy(false);
    this.book.dropAll();
    this.tree = tree;
    this.lastRequest = null;
    this.render();
    this.save();
    this.inspector.refresh();
  }

  /** An answer that still comes is kept when it is complete, or when the page is left. */
  save() {
    session.set('chat', this.tree);
    session.set('handles', this.book.used);
    this.tabs.note(this.book.used);
    if (!this.busy && !this.library.keep(this.tree)) this.notify(new Told('This browser has no room for more conversations. Delete some, or export them first.'));
    const link = this.tree.path().length ? `#chat=${this.tree.id}` : location.pathname;
    if (linked() !== this.tree.id) history.replaceState(null, '', link);
    this.chats.show();
  }
}

/** The conversation that the address names, or null. */
const linked = () => /^#chat=([\w-]+)$/.exec(location.hash)?.[1] ?? null;

new App().begin();
