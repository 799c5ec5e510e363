// The server's API over fetch: keys, errors as they were told, and nothing of the page.

/** What the server refused, or a server that cannot be reached (status 0). */
export class ApiError extends Error {
  constructor(status, error = {}, requestId = null, retryAfterS = null) {
    super(error.message || `The server answered ${status}.`);
    this.name = 'ApiError';
    this.status = status;
    this.code = error.code ?? null;
    this.index = error.index ?? null;
    this.requestId = requestId;
    this.retryAfterS = retryAfterS;
  }
}

export class Api {
  /** `keys` has `current()` and `ask(why)`, which resolves to a key, or to null if the user gave none. */
  constructor(keys) {
    this.keys = keys;
    this.model = null; // where a server has several: the one that requests without a model are for
  }

  /** A JSON answer. */
  async call(method, path, body, signal) {
    const answer = await this.request(method, path, body, signal);
    return answer.json();
  }

  /** An answer that is bytes. */
  async bytes(method, path, body) {
    return (await this.request(method, path, body)).blob();
  }

  /** A JSON answer to the bytes of a file. */
  async upload(path, file) {
    return (await this.request('POST', path, file)).json();
  }

  /** An answer whose body is a stream. */
  async stream(path, body, signal) {
    return (await this.request('POST', path, body, signal)).body;
  }

  /** A stream of events that lasts. */
  async watch(path, signal) {
    return (await this.request('GET', path, undefined, signal, { accept: 'text/event-stream' })).body;
  }

  async request(method, path, body, signal, more = {}) {
    for (;;) {
      const answer = await this.send(method, path, body, signal, more);
      if (answer.ok) return answer;
      const error = await refusal(answer);
      if (error.status !== 401 || (await this.keys.ask(error.message)) === null) throw error;
    }
  }

  async send(method, path, body, signal, more = {}) {
    const headers = { ...more };
    const key = this.keys.current();
    if (key) headers.authorization = `Bearer ${key}`;
    const isFile = body instanceof Blob;
    if (body !== undefined) headers['content-type'] = isFile ? 'application/octet-stream' : 'application/json';
    const asked = this.model === null ? path : `${path}${path.includes('?') ? '&' : '?'}model=${encodeURIComponent(this.model)}`;
    try {
      return await fetch(asked, { method, headers, signal, body: isFile ? body : body && JSON.stringify(body), cache: 'no-store' });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(0, { message: 'The server cannot be reached.', code: 'unreachable' });
    }
  }
}

async function refusal(answer) {
  const body = await answer.json().catch(() => ({}));
  const retry = Number(answer.headers.get('retry-after'));
  return new ApiError(answer.status, body?.error, answer.headers.get('x-request-id'), retry || null);
}
