// Reads the figures of the load out of the server's Prometheus metrics. Knows no element of the page.

const LINE = /^torch_stream_(running_sequences|waiting_requests|generation_tokens_total)\{.*\} (\S+)$/gm;

/** The sums over all models. */
export function loadOf(text) {
  const sums = { running_sequences: 0, waiting_requests: 0, generation_tokens_total: 0 };
  for (const [, name, value] of text.matchAll(LINE)) sums[name] += Number(value);
  return { running: sums.running_sequences, waiting: sums.waiting_requests, tokens: sums.generation_tokens_total };
}

/** Tokens per second between two readings; 0 where the counter began anew. Times in milliseconds. */
export function rateBetween(before, now) {
  const seconds = (now.time - before.time) / 1000;
  return seconds > 0 ? Math.max(0, (now.tokens - before.tokens) / seconds) : 0;
}
