// The KV handles that this page made: which message each belongs to, and which one an answer begins with.

const MOST = 48; // a server gives a key 256; a page should not take them all

export class HandleBook {
  /** `tree` returns the conversation that is open. */
  constructor(api, tree) {
    this.api = api;
    this.tree = tree;
    this.used = []; // ids, the least recently used first
  }

  /** Remember a handle as used now, and give back those that were not used for longest. */
  keep(kv) {
    this.touch(kv.id);
    while (this.used.length > MOST) this.drop(this.used[0]);
    return kv;
  }

  touch(id) {
    this.used = [...this.used.filter((other) => other !== id), id];
  }

  /** Nothing in the conversation begins with this handle any more. */
  forget(id) {
    this.used = this.used.filter((other) => other !== id);
    for (const node of this.tree().nodes.values()) {
      if (node.kv?.id === id) node.kv = null;
      if (node.promptKv?.id === id) node.promptKv = null;
    }
  }

  /** Forget a handle, on the server too. One that is gone already is fine. */
  drop(id) {
    this.forget(id);
    this.api.call('DELETE', `v1/kv/${id}`).catch(() => {});
  }

  dropAll() {
    for (const id of this.used) this.drop(id);
  }

  /** Where answers to `question` part from each other, or else the nearest earlier answer: a handle, or null. */
  async before(question) {
    try {
      return (await this.prompt(question)) ?? this.earlier(question);
    } catch {
      return this.earlier(question); // the handle to fork is gone; a shorter one does
    }
  }

  /** The KV of everything up to and with `question`: an answer's, cut where the answer began. */
  async prompt(question) {
    if (question.promptKv) return question.promptKv;
    const answers = question.children.map((id) => this.tree().nodes.get(id));
    const answer = answers.find((node) => node.kv && node.usage && !node.continued && node.usage.prompt_tokens <= node.kv.tokens);
    if (!answer) return null;
    try {
      question.promptKv = await this.cut(answer.kv.id, answer.usage.prompt_tokens);
    } catch (error) {
      if (error.status === 404 || error.status === 410) this.forget(answer.kv.id);
      throw error;
    }
    return question.promptKv;
  }

  /** The nearest earlier answer's handle; for a first question that was edited, one of the question beside it. */
  earlier(question) {
    const path = this.tree().upTo(question).slice(0, -1).reverse();
    return path.find((node) => node.kv)?.kv ?? this.beside(question);
  }

  beside(question) {
    const nodes = this.tree().nodes;
    const others = this.tree().parent(question).children.map((id) => nodes.get(id)).filter((node) => node !== question);
    const answers = others.flatMap((node) => node.children.map((id) => nodes.get(id)));
    return [...others.map((node) => node.promptKv), ...answers.map((node) => node.kv)].find(Boolean) ?? null;
  }

  /** A new handle with the first tokens of another. */
  async cut(id, length) {
    const fork = await this.api.call('POST', `v1/kv/${id}/fork`, {});
    return this.keep(await this.api.call('POST', `v1/kv/${fork.id}/truncate`, { length }));
  }
}
