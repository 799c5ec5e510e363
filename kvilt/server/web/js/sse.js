// Server-sent events from the body of an answer to fetch. Knows nothing of what is in them.

/** The connection ended before the stream did. */
export class Dropped extends Error {
  constructor() {
    super('The connection was lost before the answer was complete.');
    this.name = 'Dropped';
  }
}

/** Every event's data, parsed, up to [DONE]. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { value, done } = await next(reader);
      if (done) throw new Dropped();
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines) {
        const data = dataOf(line);
        if (data === '[DONE]') return;
        if (data !== null) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function next(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Dropped();
  }
}

/** Our server writes an event's data on one line; comments and blank lines are silence. */
function dataOf(line) {
  return line.startsWith('data:') ? line.slice(5).trim() : null;
}
