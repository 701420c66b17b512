// Calls the server that the page came from, with the key if there is one. Knows no element of the page.
// All addresses are relative, so that the page works behind a prefix.

import { EventReader } from "./sse.js";
import { brokenOff, CallFailed, failure, messageOf, unreachable } from "./errors.js";

const KEY = "torch-stream-key";
const SENDABLE = /^[^\0\r\n\u0100-\uffff]+$/; // other characters fit into no header
let askForKey = async () => false;

/** `ask`: called with true after a key was refused; resolves to true when there is a new key. */
export function whenKeyIsNeeded(ask) {
  askForKey = ask;
}

/** For this tab alone: the browser forgets it with the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export async function listModels() {
  const listed = await (await call("v1/models")).json();
  return listed.data.map((model) => ({
    id: model.id,
    chats: model.has_chat_template !== false,
    maxLength: model.max_model_len ?? null,
  }));
}

export async function readMetrics() {
  return (await call("metrics", { ask: false })).text();
}

/** Yields the chunks of a streamed answer. Throws CallFailed, also where the stream ends without its end. */
export async function* streamAnswer({ path, body }, signal) {
  const response = await call(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader();
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw signal.aborted ? error : brokenOff();
    });
    if (done) throw brokenOff();
    for (const data of events.feed(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new CallFailed(500, `The answer broke off. The server says: ${messageOf(chunk)}`);
      yield chunk;
    }
  }
}

async function call(path, { body, signal, ask = true } = {}) {
  for (;;) {
    const sent = key.get();
    const response = await request(path, body, signal, sent);
    if (response.ok) return response;
    const said = messageOf(await response.json().catch(() => null));
    if (response.status !== 401 || !ask) throw failure(response.status, said, response.headers.get("retry-after"));
    // Another call may have asked meanwhile.
    if (key.get() === sent && !(await askForKey(Boolean(sent)))) throw failure(401, said, null);
  }
}

async function request(path, body, signal, sent) {
  const headers = SENDABLE.test(sent) ? { Authorization: `Bearer ${sent}` } : {};
  const options = { signal, headers, cache: "no-store" };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
  }
  try {
    return await fetch(path, options);
  } catch (error) {
    throw signal?.aborted ? error : unreachable();
  }
}
