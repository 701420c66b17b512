// Makes the body of a request out of the conversation and the settings. Knows no transport.

/** A turn is `{prompt, answer}`; the last one is asked. Returns `{path, body}`. */
export function requestOf(model, turns, settings) {
  const { system, logprobs, more, ...sampling } = settings;
  const common = { model: model.id, stream: true, stream_options: { include_usage: true }, ...sampling };
  if (!model.chats) {
    const prompt = turns.at(-1).prompt;
    return { path: "v1/completions", body: { ...common, prompt, ...(logprobs && { logprobs: 5 }), ...more } };
  }
  const messages = system ? [{ role: "system", content: system }, ...messagesOf(turns)] : messagesOf(turns);
  const asked = logprobs ? { logprobs: true, top_logprobs: 5 } : {};
  return { path: "v1/chat/completions", body: { ...common, messages, ...asked, ...more } };
}

/** Earlier turns that have no answer are left out: templates want the roles in turn. */
function messagesOf(turns) {
  const answered = turns
    .slice(0, -1)
    .filter((turn) => turn.answer && (turn.answer.text || turn.answer.toolCalls.length));
  return [...answered.flatMap(({ prompt, answer }) => [said(prompt), replied(answer)]), said(turns.at(-1).prompt)];
}

const said = (content) => ({ role: "user", content });

function replied(answer) {
  const calls = answer.toolCalls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role: "assistant", content: answer.text, ...(calls.length && { tool_calls: calls }) };
}
