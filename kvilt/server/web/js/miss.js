// Why a prompt reused less than it might have: the reason in words, and the text where it differs.

import { el } from './dom.js';
import { count, tokens } from './numbers.js';

const REASONS = {
  tokens_differ: 'an earlier prompt has other tokens',
  evicted: 'its KV was evicted',
  expired: 'its KV was kept for a time that is over',
  other_adapter: 'its KV was computed with another adapter',
  other_salt: 'its KV belongs to another salt',
  page_boundary: 'only whole pages are shared',
  state_checkpoint: 'recurrent state is kept at checkpoints only',
  window: 'a sliding window gave its pages back',
  not_stored: 'no earlier prompt begins like it',
  blended_not_shared: 'blended KV is not shared',
  prompt_logprobs: 'a scored prompt is computed',
};

/** The reason of a miss in words. */
export function missText(miss) {
  const at = miss.first_different_token;
  const where = at === null ? '' : ` from token ${count(at)} on`;
  return `${REASONS[miss.reason] ?? miss.reason}${where}`;
}

/** What the inspector shows of a miss; nothing where there is none. */
export function missNote(miss, reused) {
  if (!miss || miss.expected <= reused) return [];
  const around = miss.text_around_it;
  const diff = around ? el('p', { class: 'miss-text' }, around.before, el('del', {}, around.earlier), el('ins', {}, around.now)) : null;
  return [el('p', { class: 'miss' }, `${tokens(miss.expected)} could have been reused: ${missText(miss)}`), diff].filter(Boolean);
}
