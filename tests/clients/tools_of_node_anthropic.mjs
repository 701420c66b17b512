// A tool loop of three turns, whole and streamed, with Anthropic's SDK for Node.
// Knows nothing of the server beyond its address. A random model answers: what has a form has it by a grammar.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const schema = { type: "object", properties: { place: { enum: ["home", "work"] }, far: { type: "boolean" } },
  required: ["place", "far"], additionalProperties: false };
const tools = [{ name: "Look", description: "Looks.", input_schema: schema }];
const forced = { tools, tool_choice: { type: "tool", name: "Look" } };
const asked = { model: "tiny", max_tokens: 200 };

const messages = [{ role: "user", content: "Where is it?" }];
for (let turn = 0; turn < 3; turn++) {
  const called = await client.messages.create({ ...asked, ...forced, messages });
  assert.equal(called.stop_reason, "tool_use");
  const [block] = called.content;
  assert.deepEqual(Object.keys(block.input), ["place", "far"]);
  const result = { type: "tool_result", tool_use_id: block.id, content: `no, turn ${turn}` };
  messages.push({ role: "assistant", content: called.content }, { role: "user", content: [result] });
}
let text = "";
const stream = client.messages.stream({ ...asked, messages, tools }).on("text", (delta) => (text += delta));
const final = await stream.finalMessage();
assert.ok(text && final.usage.output_tokens > 0);
assert.equal(text, final.content.map((block) => block.text ?? "").join(""));

assert.ok((await client.messages.countTokens({ model: "tiny", messages, tools })).input_tokens > 20);
await assert.rejects(client.messages.create({ ...asked, model: "nobody", messages }), Anthropic.NotFoundError);
await assert.rejects(client.messages.create({ ...asked, messages, top_k: -5 }), /top_k/);
