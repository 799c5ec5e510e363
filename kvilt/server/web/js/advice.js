// What to do about an error, in one sentence. The first half is what went wrong.

import { Dropped } from './sse.js';

const BY_CODE = {
  unreachable: 'Check that kvilt serve is running and that this page has its address, then try again.',
  context_length_exceeded: 'Start a new chat, edit an earlier message, or lower max tokens in the settings.',
  invalid_api_key: 'Enter a key in the settings.',
  queue_full: 'Many requests are waiting. Try again in a moment.',
  draining: 'Try again when the server is back.',
  kv_memory_full: 'Delete KV handles in the inspector, or start a new chat.',
  kv_limit: 'Delete KV handles in the inspector.',
  step_hung: 'Restart the server if this stays.',
  unknown_host: 'Open the page under a name that the server knows.',
};

/** Something that the user can mend, said in full. */
export class Told extends Error {}

/** `{what, next}` of an error. */
export function advice(error) {
  if (error instanceof Dropped) return { what: error.message, next: 'What arrived is kept. Try again to get a whole answer.' };
  if (error instanceof Told) return { what: error.message, next: '' };
  const known = BY_CODE[error.code];
  if (known) return { what: sentence(error.message), next: known };
  if (error.status >= 500) return { what: sentence(error.message), next: logged(error) };
  if (error.status === 429) return { what: sentence(error.message), next: BY_CODE.queue_full };
  if (error.status) return { what: sentence(error.message), next: 'Change what the message says, then try again.' };
  return { what: 'Something went wrong in this page.', next: `Reload it. (${error.message})` };
}

function sentence(text) {
  const first = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}

function logged(error) {
  return error.requestId ? `The server's log has it as ${error.requestId}.` : "The server's log says more.";
}
