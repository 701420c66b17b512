// Says in plain words what went wrong. Knows the statuses of the server, and no element of the page.

export class CallFailed extends Error {
  /** `status` 0: no answer came. `retryAfter`: seconds, or null where the server names none. */
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const WORDS = {
  401: "The server needs an API key, and this request had no valid one.",
  404: "The server does not know this model.",
  413: "The message is larger than the server accepts.",
  429: "The server is busy. Try again in a moment.",
  503: "The server is not ready: it is loading a model, or shutting down.",
  504: "The server did not answer within its time limit.",
};
// The server's own message says which field is wrong, or what broke; ours says what the status means.
const OURS_FIRST = new Set([401, 429, 503, 504]);

export function unreachable() {
  return new CallFailed(0, "The server cannot be reached. Check that it is running, and that the network works.");
}

export function brokenOff() {
  return new CallFailed(0, "The connection was lost before the answer had ended.");
}

/** `said`: the message in the error object of the reply, if there is one. */
export function failure(status, said, retryAfter) {
  const ours = WORDS[status] ?? (status >= 500 ? "The server failed." : "The server refused the request.");
  const seconds = retryAfter === null || retryAfter === "" ? NaN : Number(retryAfter);
  const words = OURS_FIRST.has(status) || !said ? ours : `${ours} It says: ${said}`;
  return new CallFailed(status, words, Number.isFinite(seconds) ? seconds : null);
}

/** The message of an error object, in OpenAI's spelling or in V2's. */
export function messageOf(body) {
  const error = body?.error;
  const message = typeof error === "string" ? error : error?.message;
  return typeof message === "string" ? message : "";
}
