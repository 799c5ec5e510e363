// The shown messages and the scroll position. It follows the end unless the user has scrolled away from it.

import { byId, el, icon } from './dom.js';
import { Message } from './message.js';

const NEAR = 60; // pixels from the end that still count as the end
const STARTERS = ['Why is the sky blue?', 'Write a haiku about memory.', 'Explain what a KV cache is, in two sentences.'];

export class Thread {
  constructor(tree, acts) {
    this.tree = tree;
    this.acts = acts;
    this.holder = byId('thread');
    this.scroll = byId('scroll');
    this.toEnd = byId('to-end');
    this.views = new Map();
    this.follows = true;
    this.toEnd.append(icon('down'));
    this.toEnd.addEventListener('click', () => this.goToEnd());
    this.scroll.addEventListener('scroll', () => this.scrolled(), { passive: true });
    new ResizeObserver(() => this.follow()).observe(this.holder);
  }

  /** Show the path as it is now. */
  render(busy) {
    const path = this.tree().path();
    const wanted = path.map((node) => this.view(node));
    for (const view of wanted) view.update(busy);
    const elements = path.length ? wanted.map((view) => view.element) : [this.welcome()];
    const same = elements.length === this.holder.children.length && elements.every((one, i) => this.holder.children[i] === one);
    if (!same) this.place(elements);
    if (!path.length) {
      this.follows = true; // an empty page has no end to go to
      this.toEnd.hidden = true;
    }
    this.follow();
  }

  /** Change as few elements as possible: one that is moved loses the focus. */
  place(elements) {
    const had = this.holder.children;
    let same = 0;
    while (same < elements.length && had[same] === elements[same]) same += 1;
    while (had.length > same) this.holder.lastElementChild.remove();
    this.holder.append(...elements.slice(same));
  }

  view(node) {
    let view = this.views.get(node.id);
    if (view?.node !== node) {
      view = new Message(node, this.tree, this.acts);
      this.views.set(node.id, view);
    }
    return view;
  }

  /** Only what an answer in progress changes. */
  refresh(node) {
    this.views.get(node.id)?.update(true);
    this.follow();
  }

  welcome() {
    const starter = (text) => el('button', { type: 'button', class: 'starter', on: { click: () => this.acts.start(text) } }, text);
    return el('div', { class: 'welcome' },
      el('img', { src: 'icon.svg', alt: '', width: 44, height: 44 }),
      el('h2', {}, 'What would you like to know?'),
      el('p', {}, 'Edit a message or regenerate an answer at any time. Each branch is a fork of the KV cache, so only what is new is computed.'),
      el('div', { class: 'starters' }, STARTERS.map(starter)));
  }

  focus(node) {
    this.views.get(node.id)?.element.focus();
  }

  /** The message that has the focus, or null. */
  focused() {
    const element = document.activeElement?.closest?.('.message');
    return element ? this.tree().nodes.get(element.dataset.id) ?? null : null;
  }

  /** Where in a message the focus is: a button's name, '' for the message itself, null if elsewhere. */
  standing(node) {
    if (this.focused() !== node) return null;
    return document.activeElement.matches('.message') ? '' : document.activeElement.getAttribute('aria-label');
  }

  /** Put the focus where it was, in a message that took the place of another. */
  stand(node, label) {
    const view = this.views.get(node.id);
    if (label === null || !view) return;
    const same = [...view.bar.querySelectorAll('button')].find((one) => one.getAttribute('aria-label') === label && !one.disabled);
    (same ?? view.element).focus();
  }

  edit(node) {
    this.views.get(node.id)?.edit();
  }

  scrolled() {
    const left = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight;
    this.follows = left < NEAR;
    this.toEnd.hidden = this.follows;
  }

  follow() {
    if (this.follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  goToEnd() {
    this.follows = true;
    this.follow();
  }
}
