// Texts, streams, objects and a tool loop with Vercel's `ai`, through four of its providers.
// Knows nothing of the server beyond its address. A random model answers: what has a form has it by a grammar.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const url = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "ours", baseURL: url, supportsStructuredOutputs: true, includeUsage: true });
const models = {
  chat: openai.chat("tiny"),
  responses: openai.responses("tiny"),
  compatible: compatible("tiny"),
  anthropic: createAnthropic({ baseURL: url, apiKey: "none" })("tiny"),
};
const schema = z.object({ place: z.enum(["home", "work"]), far: z.boolean() }).strict();
const tools = { Look: tool({ description: "Looks.", inputSchema: schema }) };
const toolChoice = { type: "tool", toolName: "Look" };

for (const [name, model] of Object.entries(models)) {
  const asked = { model, maxOutputTokens: 200, maxRetries: 0 };
  const messages = [{ role: "user", content: "Where is it?" }];
  for (let turn = 0; turn < 3; turn++) {
    const { toolCalls, response } = await generateText({ ...asked, messages, tools, toolChoice });
    const [call] = toolCalls;
    assert.ok(schema.parse(call.input), name);
    const output = { type: "text", value: `no, turn ${turn}` };
    const result = { type: "tool-result", toolCallId: call.toolCallId, toolName: "Look", output };
    messages.push(...response.messages, { role: "tool", content: [result] });
  }
  const { textStream, usage } = streamText({ ...asked, messages, maxOutputTokens: 20 });
  let text = "";
  for await (const piece of textStream) text += piece;
  assert.ok(text && (await usage).outputTokens > 0, name);
  const { object } = await generateObject({ ...asked, prompt: "Where is it?", schema });
  assert.ok(schema.parse(object), name);
}
