// An answer token by token: how likely each one was, and what else might have stood there. Forking is told to others.

import { el } from './dom.js';

const SHOWN = 5;
const CERTAIN = [[0.9, 4], [0.5, 3], [0.2, 2], [0, 1]];

/** What the stream says of a token, in short. */
export function drawnToken({ token, logprob, bytes, top_logprobs: top }) {
  const one = (entry) => ({ t: entry.token, p: entry.logprob, ...(entry.token.startsWith('bytes:') ? { b: entry.bytes } : {}) });
  return { ...one({ token, logprob, bytes }), top: top.map(one) };
}

/** The text of tokens; parts of characters come together. */
export function textOf(tokens) {
  const encoder = new TextEncoder();
  const bytes = tokens.flatMap(({ t, b }) => b ?? [...encoder.encode(t)]);
  return new TextDecoder().decode(new Uint8Array(bytes));
}

/** The tokens of an answer's text, or null where they are not known: reasoning, tool calls, text that a user wrote. */
export function answerTokens(node) {
  if (!node.tokens?.length || node.reasoning) return null;
  const all = textOf(node.tokens);
  if (all === node.text) return { tokens: node.tokens, end: null };
  // The token that ended the answer is none of its text.
  return textOf(node.tokens.slice(0, -1)) === node.text ? { tokens: node.tokens.slice(0, -1), end: node.tokens.at(-1) } : null;
}

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 10 ? `${share.toFixed(0)} %` : share >= 0.1 ? `${share.toFixed(1)} %` : 'under 0.1 %';
};
const visible = (text) => text.replaceAll('\n', '↵').replaceAll(' ', '␣') || '∅';

/** The answer as tokens. `fork(index, alternative)` goes on from another token. */
export function tokenView(node, fork) {
  const { tokens, end } = answerTokens(node);
  const all = end ? [...tokens, { ...end, ends: true }] : tokens;
  const popup = el('div', { class: 'alternatives', hidden: true, role: 'group', 'aria-label': 'Alternatives' });
  const cells = all.map((token, i) => cell(token, i));
  const holder = el('div', { class: 'token-view', role: 'group', 'aria-label': 'Answer, token by token; arrow keys walk, Enter shows alternatives' }, cells, popup);
  const show = (button) => {
    const index = cells.indexOf(button);
    popup.replaceChildren(...alternatives(all[index], index, fork));
    popup.hidden = false;
    popup.shownFor = button;
    const room = holder.clientWidth - popup.offsetWidth;
    popup.style.left = `${Math.max(0, Math.min(room, button.offsetLeft))}px`;
    popup.style.top = `${button.offsetTop + button.offsetHeight}px`;
  };
  const cellOf = (event) => event.target.closest?.('.token');
  holder.addEventListener('pointerover', (event) => cellOf(event) && show(cellOf(event)));
  holder.addEventListener('focusin', (event) => cellOf(event) && show(cellOf(event)));
  holder.addEventListener('click', (event) => cellOf(event) && show(cellOf(event)));
  holder.addEventListener('pointerleave', () => { popup.hidden = !holder.contains(document.activeElement); });
  holder.addEventListener('keydown', (event) => walk(event, cells, popup));
  return holder;
}

function cell(token, index) {
  const sure = CERTAIN.find(([least]) => Math.exp(token.p) >= least)[1];
  const text = token.ends ? '■' : token.t.startsWith('bytes:') ? '·' : token.t;
  return el('button', {
    type: 'button', class: `token sure-${sure}`, tabindex: index ? -1 : 0,
    'aria-label': `${token.ends ? 'end of the answer' : visible(token.t)}, ${percent(token.p)}`,
  }, text);
}

function alternatives(token, index, fork) {
  const rows = token.top.slice(0, SHOWN).map((one) => {
    const taken = one.t === token.t;
    const bar = el('span', { class: 'likely' });
    bar.style.width = `${Math.max(2, 100 * Math.exp(one.p))}%`;
    return el('button', { type: 'button', class: 'alternative', disabled: taken || one.t.startsWith('bytes:'), on: { click: () => fork(index, one) } },
      el('span', { class: 'mono' }, visible(one.t)), el('span', {}, percent(one.p)), bar);
  });
  return [el('p', {}, token.ends ? 'The answer ended here' : visible(token.t), ` · ${percent(token.p)}`), ...rows];
}

function walk(event, cells, popup) {
  const at = cells.indexOf(document.activeElement);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === 'Escape' && !popup.hidden) {
    popup.shownFor?.focus(); // shows it once more
    popup.hidden = true;
  }
  else if (step && at >= 0) cells[Math.min(cells.length - 1, Math.max(0, at + step))].focus();
  else if (event.key === 'ArrowDown' || (event.key === 'Enter' && at >= 0)) popup.querySelector('button:not(:disabled)')?.focus();
  else return;
  event.preventDefault();
  event.stopPropagation();
}
