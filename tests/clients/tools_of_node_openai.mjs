// A tool loop of three turns, a stream and responses with the openai SDK for Node.
// Knows nothing of the server beyond its address. A random model answers: what has a form has it by a grammar.

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const look = { type: "object", properties: { place: { enum: ["home", "work"] }, far: { type: "boolean" } },
  required: ["place", "far"], additionalProperties: false };
const asked = { model: "tiny", temperature: 1, seed: 4 };
const tools = [{ type: "function", function: { name: "Look", parameters: look, strict: true } }];
const forced = { type: "function", function: { name: "Look" } };

const messages = [{ role: "user", content: "Where is it?" }];
for (let turn = 0; turn < 3; turn++) {
  const { choices } = await client.chat.completions.create({ ...asked, messages, tools, tool_choice: forced, max_tokens: 200 });
  assert.equal(choices[0].finish_reason, "tool_calls");
  const [call] = choices[0].message.tool_calls;
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["place", "far"]);
  messages.push(choices[0].message, { role: "tool", tool_call_id: call.id, content: `no, turn ${turn}` });
}
const whole = await client.chat.completions.create({ ...asked, messages, max_tokens: 20 });
let text = "";
for await (const chunk of await client.chat.completions.create({ ...asked, messages, max_tokens: 20, stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
}
assert.ok(text && text === whole.choices[0].message.content);

const helper = client.chat.completions.stream({ ...asked, messages: messages.slice(0, 1), tools, tool_choice: forced, max_tokens: 200 });
assert.equal((await helper.finalChatCompletion()).choices[0].message.tool_calls[0].function.name, "Look");

const said = [{ role: "user", content: "Where is it?" }];
const responding = { model: "tiny", temperature: 1, max_output_tokens: 200 };
const functions = [{ type: "function", name: "Look", parameters: look, strict: true }];
for (let turn = 0; turn < 3; turn++) {
  const response = await client.responses.create({ ...responding, input: said, tools: functions, tool_choice: { type: "function", name: "Look" } });
  const [call] = response.output;
  assert.equal(call.type, "function_call");
  said.push(...response.output, { type: "function_call_output", call_id: call.call_id, output: `no, turn ${turn}` });
}
const kinds = [];
for await (const event of await client.responses.create({ ...responding, input: said, max_output_tokens: 12, stream: true })) {
  kinds.push(event.type);
}
assert.equal(kinds[0], "response.created");
assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);

await assert.rejects(client.chat.completions.create({ ...asked, model: "nobody", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ ...asked, messages, temperature: -1 }), /temperature/);
