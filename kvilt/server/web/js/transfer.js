// Conversations as files: JSON with all branches, and Markdown with the one that is shown.

import { titleOf } from './library.js';
import { Tree } from './tree.js';

const FORMAT = 'kvilt.conversation';

/** The whole tree, without what only this server knows. */
export function asJson(tree, title) {
  const nodes = [...tree.nodes.values()].map(({ kv, promptKv, parentKv, clock, ...node }) => node);
  return JSON.stringify({ format: FORMAT, version: 1, title, nodes }, null, 1);
}

/** The shown messages. */
export function asMarkdown(tree, title) {
  const said = tree.path().map((node) => `## ${{ user: 'You', tool: 'Results of tools' }[node.role] ?? 'Answer'}\n\n${spoken(node)}\n`);
  return `# ${title}\n\n${said.join('\n')}`;
}

function spoken({ text, calls, results }) {
  const called = (calls ?? []).map((one) => `\`${one.name}(${one.arguments})\``);
  return [text, ...called, ...(results ?? []).map((one) => `${one.name}: ${one.content}`)].filter(Boolean).join('\n\n');
}

/** A conversation from a file's text; an Error says why there is none. */
export function readConversation(text) {
  let saved;
  try {
    saved = JSON.parse(text);
  } catch {
    throw new Error('The file is no JSON. Markdown can be exported, not imported.');
  }
  if (saved?.format !== FORMAT || !Array.isArray(saved.nodes)) throw new Error('The file is no conversation of kvilt.');
  const tree = Tree.from({ nodes: saved.nodes.map(checked) });
  if (!tree.path().length) throw new Error('The file holds no message.');
  return { tree, title: typeof saved.title === 'string' ? saved.title.slice(0, 200) : titleOf(tree) };
}

/** A node of a file, of which only plain values are taken. */
function checked(node) {
  const text = (value) => (typeof value === 'string' ? value : '');
  if (!['root', 'user', 'assistant', 'tool'].includes(node?.role) || typeof node.id !== 'string') throw new Error('A message of the file cannot be read.');
  return {
    id: node.id,
    parent: typeof node.parent === 'string' ? node.parent : null,
    role: node.role,
    text: text(node.text),
    ...(text(node.reasoning) ? { reasoning: node.reasoning } : {}),
    ...(Array.isArray(node.calls) ? { calls: node.calls.map(({ id, name, arguments: given }) => ({ id: text(id), name: text(name), arguments: text(given) })) } : {}),
    ...(node.role === 'tool' ? { results: (node.results ?? []).map(({ id, name, content }) => ({ id: text(id), name: text(name), content: text(content) })) } : {}),
    children: Array.isArray(node.children) ? node.children.filter((id) => typeof id === 'string') : [],
    shown: Number.isInteger(node.shown) ? node.shown : 0,
  };
}

/** Hand a text to the user as a file. */
export function download(name, type, text) {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** A name for a file. */
export const fileName = (title, end) => `${title.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 60) || 'conversation'}.${end}`;
