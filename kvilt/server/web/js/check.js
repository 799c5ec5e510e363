// "Check this answer": the same question with everything computed, beside the blended answer.

import { el } from './dom.js';
import { seconds } from './numbers.js';
import { events } from './sse.js';
import { sharedLength } from './compare.js';

/** KL(whole || blended) of the first token, over the tokens that the whole prefill finds likeliest. */
export function divergence(whole, blended) {
  if (!whole?.top || !blended?.top) return null;
  const known = new Map(blended.top.map(({ t, p }) => [t, p]));
  const least = Math.min(...known.values());
  return Math.max(0, whole.top.reduce((sum, { t, p }) => sum + Math.exp(p) * (p - (known.get(t) ?? least)), 0));
}

/** Ask again with all of the documents computed; returns what is kept in the answer. */
export async function checkAnswer(api, body, node, drawnToken, signal) {
  const asked = performance.now();
  const stream = await api.stream('v1/chat/completions', { ...body, blend: { ...body.blend, ratio: 1, gate: false } }, signal);
  let text = '';
  let firstS = null;
  let first = null;
  for await (const chunk of events(stream)) {
    for (const { delta, logprobs } of chunk.choices ?? []) {
      first ??= logprobs?.content?.length ? drawnToken(logprobs.content[0]) : null;
      if (!delta?.content) continue;
      firstS ??= (performance.now() - asked) / 1000;
      text += delta.content;
    }
  }
  return { text, firstS, kl: divergence(first, node.tokens?.[0]), same: sharedLength(node.text, text) };
}

/** What a check found, as an element. */
export function checkNote(node) {
  const { text, firstS, kl, same } = node.checked;
  const sooner = firstS && node.speeds?.firstS ? ` (${(firstS / node.speeds.firstS).toFixed(1)}x the time of this answer)` : '';
  const parts = [
    `Computed as a whole: first token after ${firstS === null ? '?' : seconds(firstS)}${sooner}`,
    kl === null ? null : `KL of the first token ${kl.toFixed(3)}`,
    text === node.text ? 'the same text' : `the texts part after ${same} characters`,
  ];
  const other = text === node.text ? null : el('details', {}, el('summary', {}, 'The whole prefill says'),
    el('div', { class: 'compared', dir: 'auto' }, same ? el('mark', {}, text.slice(0, same)) : null, text.slice(same)));
  return el('div', { class: 'check-note' }, el('p', {}, parts.filter(Boolean).join(' · ')), other);
}
