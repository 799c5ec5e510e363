// One answer: what is sent for it, and what its stream adds to the message. Refuses to know how a message looks.

import { ApiError } from './api.js';
import { addCalls, nodeMessages } from './calls.js';
import { readJson } from './schema.js';
import { events } from './sse.js';
import { drawnToken } from './tokens.js';

const ALTERNATIVES = 5;
const MOST_ALTERNATIVES = 20; // of blended answers, which may be checked
const GONE = new Set(['kv_mismatch', 'kv_not_found', 'kv_expired']);

/** The messages that lead to an answer, as the server takes them. */
export function conversation(path, settings) {
  const system = settings.system.trim() ? [{ role: 'system', content: settings.system }] : [];
  return [...system, ...path.flatMap(nodeMessages)];
}

/** Fill `nodes`, one for each sample, with answers to `question`; a node that has text already is continued.
 *
 * Throws what went wrong; what arrived until then stays in the nodes.
 */
export async function ask({ api, book, tree, documents, ...how }, question, nodes, onChange, signal) {
  const [first] = nodes;
  const body = requestBody({ tree, ...how }, question, nodes);
  // Documents stand in a prompt of their own: their KV is blended, not forked.
  const parent = documents ? null : ((await resumed(book, first)) ?? (await book.before(question, how.model)));
  const asked = performance.now();
  for (const node of nodes) Object.assign(node, { clock: { asked }, model: how.model, miss: null, parentKv: null, calls: null, schema: readJson(how.settings.schema).value ?? null });
  if (documents) {
    Object.assign(body, documents, { seed: body.seed ?? Math.floor(Math.random() * 2 ** 31), kv_out: false, return_blended_tokens: true, ...(body.logprobs ? { top_logprobs: MOST_ALTERNATIVES } : {}) });
    for (const node of nodes) node.blended = { ...documents.blend, documents: documents.documents.length, titles: documents.documents.map((one) => one.title), seed: body.seed };
  }
  // What came with a file is KV of a session, until answers have handles of their own.
  const imported = tree.session && !documents ? { session: tree.session } : {};
  const stream = await open(api, book, { body, imported }, parent, first, signal);
  for (const node of nodes.slice(1)) Object.assign(node, { miss: first.miss, parentKv: first.parentKv });
  for await (const chunk of events(stream)) {
    take(chunk, nodes, book);
    onChange();
  }
}

/** What is sent for answers to a question. */
export function requestBody({ tree, model, settings, drawn }, question, nodes) {
  const [first] = nodes;
  const messages = conversation(tree.upTo(question), settings);
  return {
    messages: first.text ? [...messages, { role: 'assistant', content: first.text }] : messages,
    ...(first.text ? { continue_final_message: true, add_generation_prompt: false } : {}),
    ...(model ? { model } : {}),
    ...drawn,
    ...(settings.maxTokens ? { max_tokens: settings.maxTokens } : {}),
    ...(settings.probabilities ? { logprobs: true, top_logprobs: ALTERNATIVES } : {}),
    ...(nodes.length > 1 ? { n: nodes.length } : {}),
    ...given(settings),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
    kv_out: true,
  };
}

/** The tools and the schema of the settings. A text that is no JSON is left out; the settings say so. */
function given({ tools, schema }) {
  const [listed, wanted] = [readJson(tools).value, readJson(schema).value];
  return {
    ...(listed ? { tools: [listed].flat().map((one) => (one.function ? one : { type: 'function', function: one })) } : {}),
    ...(wanted ? { response_format: { type: 'json_schema', json_schema: { name: 'answer', schema: wanted } } } : {}),
  };
}

/** The KV that an answer is continued from: another answer's, cut where they part. */
async function resumed(book, node) {
  if (!node.resume) return null;
  return book.cut(node.resume.kv, node.resume.length).catch(() => null);
}

/** Begin with the parent's KV. A handle that does not fit is no reason to fail: the answer is computed without it. */
async function open(api, book, { body, imported }, parent, node, signal) {
  if (parent) {
    try {
      const stream = await api.stream('v1/chat/completions', { ...body, kv: parent.id }, signal);
      book.touch(parent.id);
      node.parentKv = { id: parent.id, tokens: parent.tokens };
      return stream;
    } catch (error) {
      if (!GONE.has(error.code)) throw error;
      if (error.code !== 'kv_mismatch') book.forget(parent.id);
      else if (error.index > 0) return openShared(api, book, body, parent, error.index, node, signal);
      node.miss = { code: error.code, index: error.index };
    }
  }
  return api.stream('v1/chat/completions', { ...body, ...imported }, signal);
}

/** Begin with the part of a handle that the prompt does share. */
async function openShared(api, book, body, parent, length, node, signal) {
  node.miss = { code: 'kv_mismatch', index: length };
  try {
    const part = await book.cut(parent.id, length);
    const stream = await api.stream('v1/chat/completions', { ...body, kv: part.id }, signal);
    node.parentKv = { id: part.id, tokens: part.tokens };
    node.miss = null;
    return stream;
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    return api.stream('v1/chat/completions', body, signal);
  }
}

function take(chunk, nodes, book) {
  if (chunk.error) return fail(chunk.error, nodes[0]);
  for (const node of nodes) {
    if (chunk.prompt_progress) node.progress = chunk.prompt_progress;
    if (chunk.usage?.prompt_tokens) node.usage = nodes.length > 1 ? shareOf(chunk.usage, node) : chunk.usage;
    node.clock.last = performance.now();
  }
  for (const { index, delta, finish_reason: reason, kv, logprobs } of chunk.choices ?? []) {
    const node = nodes[index ?? 0];
    if (logprobs?.content) node.tokens = [...(node.tokens ?? []), ...logprobs.content.map(drawnToken)];
    if (delta?.content || delta?.reasoning_content) heard(delta, node);
    if (delta?.tool_calls) addCalls(node, delta.tool_calls);
    if (reason) node.finish = reason;
    if (kv) node.kv = book.keep(kv);
  }
}

/** The counts of several samples, as one of them sees them. */
function shareOf(usage, node) {
  return { ...usage, completion_tokens: node.tokens?.length ?? usage.completion_tokens };
}

function heard(delta, node) {
  node.clock.first ??= performance.now();
  node.text += delta.content ?? '';
  if (delta.reasoning_content) node.reasoning = (node.reasoning ?? '') + delta.reasoning_content;
}

function fail(error, node) {
  // The answer is whole; only its KV found no place.
  if (error.code === 'kv_limit' && node.text) return;
  throw new ApiError(error.type === 'server_error' ? 503 : 400, error);
}

/** Times and speeds of an answer; null for what is not known yet. */
export function speeds(node) {
  const { asked, first, last } = node.clock ?? {};
  const drawn = node.usage?.completion_tokens ?? 0;
  return {
    firstS: first === undefined ? null : (first - asked) / 1000,
    perSecond: drawn > 1 && last > first ? (drawn - 1) / ((last - first) / 1000) : null,
  };
}
