// The conversations that this browser keeps: one record each, and a list of them. Knows storage, not how a list looks.

import { local } from './storage.js';

const LIST = 'chats';
const record = (id) => `chat.${id}`;

/** The first words of a conversation, for the list. */
export function titleOf(tree) {
  const first = tree.path().find((node) => node.role === 'user');
  const words = (first?.text ?? '').replace(/\s+/g, ' ').trim();
  return words.length > 60 ? `${words.slice(0, 59).trimEnd()}…` : words || 'Empty conversation';
}

export class Library {
  /** `{id, title, changed}` of each, the newest first. */
  list() {
    return local.get(LIST, []).toSorted((a, b) => b.changed - a.changed);
  }

  /** Those whose title or text has all of the words. */
  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return this.list();
    return this.list().filter((one) => {
      const said = this.load(one.id)?.nodes.map((node) => node.text).join('\n') ?? '';
      const all = `${one.title}\n${said}`.toLowerCase();
      return words.every((word) => all.includes(word));
    });
  }

  /** A conversation as it was written, or null. */
  load(id) {
    return local.get(record(id));
  }

  /** Write a conversation; false where the browser has no room. One without messages is not kept. */
  keep(tree) {
    if (!tree.path().length) return true;
    const before = local.get(LIST, []);
    const had = before.find((one) => one.id === tree.id);
    const title = had?.named ? had.title : titleOf(tree);
    if (!local.set(record(tree.id), tree)) return false;
    return local.set(LIST, [...before.filter((one) => one.id !== tree.id), { ...had, id: tree.id, title, changed: Date.now() }]);
  }

  rename(id, title) {
    local.set(LIST, local.get(LIST, []).map((one) => (one.id === id ? { ...one, title, named: true } : one)));
  }

  remove(id) {
    local.set(LIST, local.get(LIST, []).filter((one) => one.id !== id));
    local.set(record(id), null);
  }
}
