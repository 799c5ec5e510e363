// Calls of tools in an answer, and the form in which a user gives their results.

import { el } from './dom.js';

/** Add a piece of a call that streams in. */
export function addCalls(node, pieces) {
  node.calls ??= [];
  for (const { index, id, function: said } of pieces) {
    const call = (node.calls[index] ??= { id: '', name: '', arguments: '' });
    if (id) call.id = id;
    call.name += said?.name ?? '';
    call.arguments += said?.arguments ?? '';
  }
}

/** The messages of a node as the server takes them. */
export function nodeMessages(node) {
  if (node.role === 'tool') return node.results.map(({ id, content }) => ({ role: 'tool', tool_call_id: id, content }));
  const calls = node.calls?.length ? { tool_calls: node.calls.map(({ id, name, arguments: given }) => ({ id, type: 'function', function: { name, arguments: given } })) } : {};
  return [{ role: node.role, content: node.text, ...calls }];
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** The calls as cards; `answer(results)` goes on with what the user says they return, or is null where they were answered. */
export function callCards(node, answer) {
  const boxes = [];
  const cards = node.calls.map((call) => {
    const box = el('textarea', { rows: 2, class: 'rewrite', 'aria-label': `Result of ${call.name}` });
    boxes.push(box);
    return el('div', { class: 'call' }, el('div', { class: 'code-head' }, el('span', { class: 'mono' }, call.name), el('span', {}, 'tool call')),
      el('pre', { tabindex: 0, 'aria-label': 'Arguments' }, el('code', {}, pretty(call.arguments))), answer ? box : null);
  });
  const go = () => answer(node.calls.map((call, i) => ({ id: call.id, name: call.name, content: boxes[i].value })));
  return el('div', { class: 'calls' }, cards, answer ? el('button', { type: 'button', class: 'plain main', on: { click: go } }, 'Send the results') : null);
}
