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

  /** Where answers to `question` part from each other, or else the nearest earlier answer: a handle, or null.
   *
   * KV of another adapter is of no use: only answers of the same `model` count.
   */
  async before(question, model) {
    const same = (node) => !node.model || !model || node.model === model;
    try {
      return (await this.prompt(question, same)) ?? this.earlier(question, same);
    } catch {
      return this.earlier(question, same); // the handle to fork is gone; a shorter one does
    }
  }

  /** The KV of everything up to and with `question`: an answer's, cut where the answer began. */
  async prompt(question, same) {
    if (question.promptKv && same(question.promptKv)) return question.promptKv;
    const answers = question.children.map((id) => this.tree().nodes.get(id));
    const answer = answers.find((node) => node.kv && same(node) && node.usage && !node.continued && node.usage.prompt_tokens <= node.kv.tokens);
    if (!answer) return null;
    try {
      question.promptKv = { ...(await this.cut(answer.kv.id, answer.usage.prompt_tokens)), model: answer.model };
    } catch (error) {
      if (error.status === 404 || error.status === 410) this.forget(answer.kv.id);
      throw error;
    }
    return question.promptKv;
  }

  /** The nearest earlier answer's handle; for a first question that was edited, one of the question beside it. */
  earlier(question, same) {
    const path = this.tree().upTo(question).slice(0, -1).reverse();
    return path.find((node) => node.kv && same(node))?.kv ?? this.beside(question, same);
  }

  beside(question, same) {
    const nodes = this.tree().nodes;
    const others = this.tree().parent(question).children.map((id) => nodes.get(id)).filter((node) => node !== question);
    const answers = others.flatMap((node) => node.children.map((id) => nodes.get(id)));
    const kept = [...others.map((node) => node.promptKv).filter((kv) => kv && same(kv)), ...answers.filter(same).map((node) => node.kv)];
    return kept.find(Boolean) ?? null;
  }

  /** A new handle with the first tokens of another. */
  async cut(id, length) {
    const fork = await this.api.call('POST', `v1/kv/${id}/fork`, {});
    return this.keep(await this.api.call('POST', `v1/kv/${fork.id}/truncate`, { length }));
  }
}
