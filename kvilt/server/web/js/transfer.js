// Conversations as files: JSON with all branches, Markdown with the one that is shown, and a session's file with KV.

import { el } from './dom.js';
import { titleOf, Tree } from './tree.js';

const FORMAT = 'kvilt.conversation';

const elsewhere = ({ kv, promptKv, parentKv, clock, resume, ...node }) => node;

/** A conversation as the server keeps it: without what one tab alone uses. */
export const portable = (tree) => JSON.stringify({ nodes: [...tree.nodes.values()].map(elsewhere), ...tree.given });

/** The whole tree, without what only this server knows. */
export function asJson(tree, title) {
  const { session, ...given } = tree.given;
  return JSON.stringify({ format: FORMAT, version: 1, title, nodes: [...tree.nodes.values()].map(elsewhere), ...given }, null, 1);
}

/** The file of a session: the conversation, and the KV of its answers as far as the server still has it. */
export async function asSession(api, tree, title) {
  const { data } = await api.call('GET', 'v1/kv');
  const there = new Set(data.map((one) => one.id));
  const kv = [...tree.nodes.values()].map((node) => node.kv?.id).filter((id) => there.has(id));
  return api.bytes('POST', 'v1/sessions/export', { name: `page-${tree.id}`, kv, conversation: asJson(tree, title) });
}

/** A conversation from the file of a session, which answers then begin with; an Error says why there is none. */
export async function readSession(api, file) {
  const made = await api.upload('v1/sessions/import', file);
  try {
    if (!made.conversation) throw new Error('The file is a session without a conversation. Import it with: kvilt session import');
    const { tree, title } = readConversation(made.conversation);
    tree.session = made.name;
    return { tree, title, kv: made.kv, why: made.why };
  } catch (error) {
    await api.call('DELETE', `v1/sessions/${made.id}`).catch(() => {});
    throw error;
  }
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
  const documents = Array.isArray(saved.documents) ? saved.documents.map(givenDocument) : [];
  const tree = Tree.from({ nodes: saved.nodes.map(checked), documents, blend: recipe(saved.blend) });
  if (!tree.path().length) throw new Error('The file holds no message.');
  return { tree, title: typeof saved.title === 'string' ? saved.title.slice(0, 200) : titleOf(tree) };
}

const text = (value) => (typeof value === 'string' ? value : '');

const givenDocument = ({ title, text: said }) => ({ title: text(title) || 'Document', text: text(said), state: 'unknown' });

function recipe(blend) {
  const ratio = Number(blend?.ratio);
  return { ...(ratio >= 0 && ratio <= 1 ? { ratio } : {}), ...(text(blend?.strategy) ? { strategy: blend.strategy } : {}) };
}

/** A node of a file, of which only plain values are taken. */
function checked(node) {
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

/** Hand a text, or bytes, to the user as a file. */
export function download(name, type, data) {
  const link = el('a');
  link.href = URL.createObjectURL(new Blob([data], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** A name for a file. */
export const fileName = (title, end) => `${title.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 60) || 'conversation'}.${end}`;
