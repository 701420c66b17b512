// Tells screen readers what happens, at most every few seconds: an answer that grows would drown everything else.

import { byId } from "./dom.js";

const PAUSE_MS = 3000;
let pending = "";
let timer = null;

/** Says the text with the next announcement. */
export function announce(text) {
  pending += text;
  timer ??= setTimeout(flush, PAUSE_MS);
}

/** Says the text at once, behind what waits. */
export function announceNow(text) {
  clearTimeout(timer);
  pending += ` ${text}`;
  flush();
}

function flush() {
  timer = null;
  const text = pending.trim();
  pending = "";
  if (text) byId("announcer").textContent = text;
}
