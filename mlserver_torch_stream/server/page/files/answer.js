// One answer: folds the chunks of a stream, in both of OpenAI's spellings, and measures. Knows no transport.

export class Answer {
  text = "";
  reasoning = "";
  toolCalls = [];
  /** `{text, probability, others: [{text, probability}]}`, where probabilities were asked for. */
  tokens = [];
  finishReason = null;
  usage = null;
  error = null;
  stopped = false;
  ended = false;
  #begun;
  #first = null;
  #last = null;
  #chunks = 0;

  /** `now`: milliseconds. */
  constructor(now) {
    this.#begun = now;
  }

  get isEmpty() {
    return !this.text && !this.reasoning && this.toolCalls.length === 0;
  }

  add(chunk, now) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    const before = this.text.length + this.reasoning.length;
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) this.#addCall(call);
    this.tokens.push(...tokensOf(choice.logprobs));
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (this.text.length + this.reasoning.length > before || delta.tool_calls?.length) this.#measure(now);
  }

  /** Ends it once: `error` is what it failed with, if it did. */
  end({ error = null, stopped = false } = {}) {
    Object.assign(this, { error, stopped, ended: true });
  }

  /** Until the first token, null before it. */
  get firstTokenMs() {
    return this.#first === null ? null : this.#first - this.#begun;
  }

  /** Tokens so far; exact at the end, or with probabilities. Else each chunk counts as one. */
  get tokenCount() {
    return this.usage?.completion_tokens ?? (this.tokens.length || this.#chunks);
  }

  get isCounted() {
    return this.usage !== null || this.tokens.length > 0;
  }

  /** Tokens after the first one, by the time since it; null while there is nothing to measure. */
  get tokensPerSecond() {
    const seconds = (this.#last - this.#first) / 1000;
    return this.tokenCount > 1 && seconds > 0 ? (this.tokenCount - 1) / seconds : null;
  }

  #measure(now) {
    this.#first ??= now;
    this.#last = now;
    this.#chunks += 1;
  }

  #addCall(piece) {
    const index = piece.index ?? this.toolCalls.length;
    const call = (this.toolCalls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= piece.id ?? "";
    call.name ||= piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
}

/** The tokens of a choice's `logprobs`, which chats and completions spell in two ways. */
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((each) =>
      token(
        each.token,
        each.logprob,
        each.bytes,
        (each.top_logprobs ?? []).map((top) => [top.token, top.logprob]),
      ),
    );
  }
  return (logprobs.tokens ?? []).map((text, i) =>
    token(text, logprobs.token_logprobs[i], null, Object.entries(logprobs.top_logprobs?.[i] ?? {})),
  );
}

function token(text, logprob, bytes, top) {
  const others = top.map(([other, value]) => ({ text: other, probability: Math.exp(value) }));
  others.sort((a, b) => b.probability - a.probability);
  return { text, bytes, probability: Math.exp(logprob), others };
}
