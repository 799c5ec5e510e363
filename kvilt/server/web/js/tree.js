// A conversation as a tree: every message may have several successors, of which one is shown. Only data, no page.

let made = 0;
const newId = () => `m${Date.now().toString(36)}${(made += 1).toString(36)}`;

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
    const given = this.documents?.length ? { documents: this.documents, blend: this.blend } : {};
    return { id: this.id, nodes: [...this.nodes.values()], ...given };
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
      tree.root = tree.nodes.get('root');
      tree.path();
      return tree;
    } catch {
      return new Tree();
    }
  }
}
