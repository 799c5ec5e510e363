// The conversations that are kept: on the server where it keeps them (--store), else in this browser. Knows where they
// are, not how a list looks. A conversation on its way to the server is in the browser until it has arrived.

import { portable } from './transfer.js';
import { local } from './storage.js';
import { titleOf, Tree } from './tree.js';

const LIST = 'chats';
const PAUSE_MS = 400; // several changes are one write
const record = (id) => `chat.${id}`;
const path = (id) => `v1/chats/${encodeURIComponent(id)}`;

export class Library {
  /**
   * `onTrouble` hears of conversations that the server did not take; they stay in the browser. `onMerged` hears of
   * one that got what another page had added.
   */
  constructor(api, onTrouble, onMerged) {
    Object.assign(this, { api, onTrouble, onMerged });
    this.onServer = false;
    this.waiting = null; // a conversation to write
    this.writing = Promise.resolve();
    this.written = new Map(); // by id: what the server has
  }

  /** Learn whether the server keeps conversations. */
  async begin() {
    this.onServer = (await this.api.call('GET', 'v1/chats')).kept;
  }

  /** `{id, title, changed, here}` of those whose title or text has all of the words, the newest first. */
  async find(words = '') {
    const own = this.search(words);
    if (!this.onServer) return own;
    const { data } = await this.api.call('GET', `v1/chats?q=${encodeURIComponent(words)}`);
    const there = data.map(({ id, title, changed_s: s }) => ({ id, title, changed: 1000 * s, here: false }));
    const known = new Set(there.map((one) => one.id));
    return [...there, ...own.filter((one) => !known.has(one.id))].toSorted((a, b) => b.changed - a.changed);
  }

  /** A conversation, or null. */
  async load(id) {
    const own = local.get(record(id));
    const there = this.onServer ? await this.read(id) : null;
    if (there && own) there.merge(Tree.from(own)); // it was on its way
    return there ?? (own ? Tree.from(own) : null);
  }

  /** A conversation of this browser, at once. */
  loadHere(id) {
    const own = local.get(record(id));
    return own ? Tree.from(own) : null;
  }

  async read(id) {
    try {
      const { conversation, revision } = await this.api.call('GET', path(id));
      const tree = Tree.from({ ...JSON.parse(conversation), id, revision });
      this.written.set(id, portable(tree));
      return tree;
    } catch (error) {
      if (error.code === 'chat_not_found') return null;
      throw error;
    }
  }

  /** Keep a conversation; false where the browser has no room. One without messages is not kept. */
  keep(tree) {
    if (!tree.path().length) return true;
    if (this.onServer && portable(tree) === this.written.get(tree.id)) return true;
    const room = this.keepHere(tree);
    if (!this.onServer) return room;
    this.waiting = tree;
    this.timer ??= setTimeout(() => this.flush(), PAUSE_MS);
    return true;
  }

  keepHere(tree) {
    const before = local.get(LIST, []);
    const had = before.find((one) => one.id === tree.id);
    const title = had?.named ? had.title : titleOf(tree);
    if (!local.set(record(tree.id), tree)) return false;
    return local.set(LIST, [...before.filter((one) => one.id !== tree.id), { ...had, id: tree.id, title, changed: Date.now() }]);
  }

  /** Write what waits; resolves when all is written. */
  flush() {
    clearTimeout(this.timer);
    const tree = this.waiting;
    Object.assign(this, { timer: null, waiting: null });
    if (tree) this.writing = this.writing.then(() => this.write(tree)).catch(this.onTrouble);
    return this.writing;
  }

  /** Write a conversation. What another page has added to it meanwhile is taken in first. */
  async write(tree) {
    for (let tries = 0; ; tries += 1) {
      const conversation = portable(tree);
      try {
        const { revision } = await this.api.call('PUT', path(tree.id), { title: titleOf(tree), conversation, revision: tree.revision ?? 0 });
        tree.revision = revision;
        this.written.set(tree.id, conversation);
        if (this.waiting !== tree) this.removeHere(tree.id);
        return;
      } catch (error) {
        if (error.code !== 'chat_changed' || tries > 2) throw error;
        const there = await this.read(tree.id);
        tree.revision = there?.revision ?? 0;
        if (!there) continue;
        tree.merge(there);
        this.onMerged(tree);
      }
    }
  }

  async rename(id, title) {
    await this.flush();
    if (local.get(record(id)) || !this.onServer) local.set(LIST, local.get(LIST, []).map((one) => (one.id === id ? { ...one, title, named: true } : one)));
    else await this.api.call('POST', path(id), { title });
  }

  async remove(id) {
    if (this.waiting?.id === id) this.waiting = null;
    await this.flush();
    this.removeHere(id);
    this.written.delete(id);
    if (this.onServer) await this.api.call('DELETE', path(id)).catch((error) => { if (error.code !== 'chat_not_found') throw error; });
  }

  removeHere(id) {
    local.set(LIST, local.get(LIST, []).filter((one) => one.id !== id));
    local.set(record(id), null);
  }

  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const all = local.get(LIST, []).map((one) => ({ ...one, here: true })).toSorted((a, b) => b.changed - a.changed);
    if (!words.length) return all;
    return all.filter((one) => {
      const said = local.get(record(one.id))?.nodes.map((node) => node.text).join('\n') ?? '';
      return words.every((word) => `${one.title}\n${said}`.toLowerCase().includes(word));
    });
  }
}
