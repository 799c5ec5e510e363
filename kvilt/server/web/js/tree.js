// A conversation as a tree: every message may have several successors, of which one is shown. Only data, no page.

let made = 0;
// Two browsers may write one conversation at the same time: ids must differ.
const newId = () => `m${Date.now().toString(36)}${(made += 1).toString(36)}${Math.random().toString(36).slice(2, 6)}`;

/** The first words of a conversation, for the list. */
export function titleOf(tree) {
  const first = tree.path().find((node) => node.role === 'user');
  const words = (first?.text ?? '').replace(/\s+/g, ' ').trim();
  return words.length > 60 ? `${words.slice(0, 59).trimEnd()}…` : words || 'Empty conversation';
}

export class Tree {
  constructor(id = newId()) {
    this.id = id;
    this.nodes = new Map();
    this.root = this.place({ id: 'root', parent: null, role: 'root', text: '' });
  }

  place(fields) {
    const node = { children: [], shown: 0, state: 'done', kv: null, usage: null, ...fields };
    this.nodes.set(node.id, node);
    return node;
  }

  /** A new last successor of `parent`, which is shown from now on. */
  add(parent, role, text, fields = {}) {
    const node = this.place({ id: newId(), parent: parent.id, role, text, ...fields });
    parent.children.push(node.id);
    parent.shown = parent.children.length - 1;
    return node;
  }

  parent(node) {
    return this.nodes.get(node.parent);
  }

  /** The messages that are shown, first to last. */
  path() {
    const path = [];
    for (let node = this.root; node.children.length > 0; ) {
      node = this.nodes.get(node.children[node.shown]);
      path.push(node);
    }
    return path;
  }

  /** From the first message to this one. */
  upTo(node) {
    const path = [];
    for (let at = node; at && at.role !== 'root'; at = this.parent(at)) path.unshift(at);
    return path;
  }

  /** Which of how many branches a message is; the first is 0. */
  placeOf(node) {
    const { children } = this.parent(node);
    return { at: children.indexOf(node.id), of: children.length };
  }

  /** Show the branch `by` places further; whether there was one. */
  walk(node, by) {
    const parent = this.parent(node);
    const to = parent.children.indexOf(node.id) + by;
    if (to < 0 || to >= parent.children.length) return false;
    parent.shown = to;
    return true;
  }

  get last() {
    return this.path().at(-1) ?? null;
  }

  toJSON() {
    return { id: this.id, nodes: [...this.nodes.values()], ...this.given, ...(this.revision ? { revision: this.revision } : {}) };
  }

  /** What a conversation has besides its messages. */
  get given() {
    const { documents, blend, session } = this;
    return { ...(documents?.length ? { documents, blend } : {}), ...(session ? { session } : {}) };
  }

  /**
   * Take in what another page has added to the same conversation; what is shown here stays shown. An answer that was
   * not complete when this page got it is replaced by the complete one.
   */
  merge(other) {
    for (const [id, node] of other.nodes) {
      const own = this.nodes.get(id);
      if (!own) {
        this.nodes.set(id, node);
        continue;
      }
      const { children, shown } = own;
      children.push(...node.children.filter((child) => !children.includes(child)));
      if (own.state === 'dropped' && node.state !== 'dropped') Object.assign(own, node, { children, shown });
    }
  }

  /** A tree that was written before; an empty one where that cannot be read. */
  static from(saved) {
    const tree = new Tree(saved?.id);
    try {
      if (!saved) return tree;
      for (const node of saved.nodes) {
        const state = node.state === 'streaming' ? 'dropped' : node.state;
        tree.place({ ...node, state });
      }
      if (Array.isArray(saved.documents)) Object.assign(tree, { documents: saved.documents, blend: saved.blend });
      if (typeof saved.session === 'string') tree.session = saved.session;
      if (Number.isInteger(saved.revision)) tree.revision = saved.revision;
      tree.root = tree.nodes.get('root');
      tree.path();
      return tree;
    } catch {
      return new Tree();
    }
  }
}
