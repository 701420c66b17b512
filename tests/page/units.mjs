// Properties of the page's modules that need no page. Run by test_page_units.py, with a copy of the files beside it.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createServer } from "node:http";
import test from "node:test";

import { Answer, tokensOf } from "./files/answer.js";
import { key, listModels, whenKeyIsNeeded } from "./files/api.js";
import { failure, messageOf } from "./files/errors.js";
import { blocksOf } from "./files/markdown.js";
import { loadOf, rateBetween } from "./files/metrics.js";
import { requestOf } from "./files/request.js";
import { readSettings } from "./files/settings.js";
import { EventReader } from "./files/sse.js";

const EMPTY = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", stop: "", more: "" };
const chunk = (delta, rest = {}) => ({ choices: [{ index: 0, delta, finish_reason: null, ...rest }] });

for (const end of ["\n", "\r\n", "\r"]) {
  test(`events are the same however a stream is cut, with lines that end with ${JSON.stringify(end)}`, () => {
    const stream = [
      ": ping",
      "",
      'data: {"a": "é"}',
      "",
      "event: x",
      "data: one",
      "data:two",
      "",
      "data: [DONE]",
      "",
      "",
    ];
    const text = stream.join(end);
    const expected = ['{"a": "é"}', "one\ntwo", "[DONE]"];
    for (let first = 0; first <= text.length; first += 1) {
      for (let second = first; second <= text.length; second += 3) {
        const reader = new EventReader();
        const pieces = [text.slice(0, first), text.slice(first, second), text.slice(second), end];
        assert.deepEqual(
          pieces.flatMap((piece) => reader.feed(piece)),
          expected,
          `${first} ${second}`,
        );
      }
    }
  });
}

test("an event is given as soon as it is complete", () => {
  assert.deepEqual(new EventReader().feed("data: 1\n\ndata: 2"), ["1"]);
  assert.deepEqual(new EventReader().feed("data: 1\r\n\r\n"), ["1"]);
});

test("an answer is its pieces together, text apart from reasoning and tool calls", () => {
  const answer = new Answer(1000);
  const call = (index, rest) => chunk({ tool_calls: [{ index, ...rest }] });
  const chunks = [
    chunk({ role: "assistant", content: "" }),
    chunk({ reasoning: "It " }),
    chunk({ reasoning_content: "is." }),
    chunk({ content: "Hel" }),
    chunk({ content: "lo" }),
    call(0, { id: "a", function: { name: "add", arguments: '{"x"' } }),
    call(1, { id: "b", function: { name: "sub", arguments: "" } }),
    call(0, { function: { arguments: ": 1}" } }),
    chunk({}, { finish_reason: "tool_calls" }),
    { choices: [], usage: { completion_tokens: 9 } },
  ];
  chunks.forEach((each, i) => answer.add(each, 1000 + 500 * i));
  assert.equal(answer.text, "Hello");
  assert.equal(answer.reasoning, "It is.");
  assert.deepEqual(
    answer.toolCalls.map((each) => [each.id, each.name, each.arguments]),
    [
      ["a", "add", '{"x": 1}'],
      ["b", "sub", ""],
    ],
  );
  assert.equal(answer.finishReason, "tool_calls");
  assert.equal(answer.firstTokenMs, 500, "the chunk of the role is no token");
  assert.equal(answer.tokensPerSecond, 8 / 3, "8 tokens after the first, from 1.5 s to 4.5 s");
});

test("a completion's chunks are an answer too", () => {
  const answer = new Answer(0);
  for (const text of ["a", "b"]) answer.add({ choices: [{ index: 0, text, finish_reason: null }] }, 10);
  assert.equal(answer.text, "ab");
  assert.equal(answer.isCounted, false, "without a usage the count is the number of chunks");
});

test("probabilities are read out of both spellings, the most likely first", () => {
  const chat = {
    content: [
      {
        token: "b",
        logprob: Math.log(0.25),
        top_logprobs: [
          { token: "b", logprob: Math.log(0.25) },
          { token: "a", logprob: Math.log(0.5) },
        ],
      },
    ],
  };
  const completion = {
    tokens: ["b"],
    token_logprobs: [Math.log(0.25)],
    top_logprobs: [{ b: Math.log(0.25), a: Math.log(0.5) }],
  };
  for (const [token] of [tokensOf(chat), tokensOf(completion)]) {
    assert.equal(token.text, "b");
    assert.equal(token.probability.toFixed(6), "0.250000");
    assert.deepEqual(
      token.others.map((other) => other.text),
      ["a", "b"],
    );
  }
  assert.deepEqual(tokensOf(null), []);
});

test("a request has the conversation without the turns that failed, and the settings that were given", () => {
  const answered = { prompt: "one", answer: Object.assign(new Answer(0), { text: "1" }) };
  const failed = { prompt: "two", answer: new Answer(0) };
  const turns = [answered, failed, { prompt: "three", answer: null }];
  const settings = readSettings({
    ...EMPTY,
    system: "Be kind.",
    temperature: "0,5",
    stop: "x\n\ny",
    more: '{"top_k": 3}',
  });
  const chat = requestOf({ id: "m", chats: true }, turns, { ...settings, logprobs: true });
  assert.equal(chat.path, "v1/chat/completions");
  assert.deepEqual(chat.body, {
    model: "m",
    stream: true,
    stream_options: { include_usage: true },
    temperature: 0.5,
    stop: ["x", "y"],
    messages: [
      { role: "system", content: "Be kind." },
      { role: "user", content: "one" },
      { role: "assistant", content: "1" },
      { role: "user", content: "three" },
    ],
    logprobs: true,
    top_logprobs: 5,
    top_k: 3,
  });
  const plain = requestOf({ id: "m", chats: false }, turns, { system: "Be kind.", logprobs: true });
  assert.equal(plain.path, "v1/completions");
  assert.deepEqual(plain.body, {
    model: "m",
    stream: true,
    stream_options: { include_usage: true },
    prompt: "three",
    logprobs: 5,
  });
});

test("a setting that is wrong is named, and an empty one is left out", () => {
  assert.deepEqual(readSettings(EMPTY), {});
  const wrong = { temperature: "warm", top_p: "2", max_tokens: "1.5", seed: "-1", more: "[1]" };
  for (const [field, value] of Object.entries(wrong)) {
    assert.throws(
      () => readSettings({ ...EMPTY, [field]: value }),
      (error) => error.field === field && error.message.length > 20,
    );
  }
});

test("the blocks of a text that grows lose no line, and those before the last two stay", () => {
  const text = "Intro\n# Head\n- a\n- b\n\n1. x\n2. y\n```py\n# no heading\n\n- no item\n```\nend `c`\n~~~\nopen";
  const lines = (blocks) =>
    blocks
      .join("\n")
      .split("\n")
      .filter((line) => line.trim());
  let before = [];
  for (let end = 0; end <= text.length; end += 1) {
    const blocks = blocksOf(text.slice(0, end));
    assert.deepEqual(
      lines(blocks),
      text
        .slice(0, end)
        .split("\n")
        .filter((line) => line.trim()),
    );
    const kept = Math.max(0, before.length - 2);
    assert.deepEqual(blocks.slice(0, kept), before.slice(0, kept));
    before = blocks;
  }
  assert.deepEqual(before, [
    "Intro",
    "# Head",
    "- a\n- b",
    "1. x\n2. y",
    "```py\n# no heading\n\n- no item\n```",
    "end `c`",
    "~~~\nopen",
  ]);
});

test("errors are said in plain words, with what the server says of a wrong request", () => {
  assert.equal(failure(429, "queue full", "7").retryAfter, 7);
  assert.match(failure(429, "queue full", null).message, /busy/);
  assert.match(failure(503, "", "1").message, /not ready/);
  assert.match(failure(400, "temperature: wrong", null).message, /refused.*temperature: wrong/);
  assert.match(failure(500, "", null).message, /failed/);
  assert.equal(failure(503, "", "Wed, 21 Oct 2026 07:28:00 GMT").retryAfter, null);
  assert.equal(messageOf({ error: { message: "a" } }) + messageOf({ error: "b" }) + messageOf(null), "ab");
});

test("a key that fits into no header is asked for again, as one that the server does not take", async (t) => {
  const server = createServer((asked, answer) => {
    const allowed = asked.headers.authorization === "Bearer right";
    answer.writeHead(allowed ? 200 : 401).end(JSON.stringify(allowed ? { data: [] } : { error: "a key" }));
  });
  await new Promise((listens) => server.listen(0, "127.0.0.1", listens));
  t.after(() => (server.closeAllConnections(), server.close()));
  const kept = new Map();
  t.mock.method(globalThis, "fetch", fetchFrom(`http://127.0.0.1:${server.address().port}/`));
  globalThis.sessionStorage = { getItem: (name) => kept.get(name), setItem: (name, text) => kept.set(name, text) };
  for (const wrong of ["", "wrong", "r🙂ght", "rıght", "right\nand more"]) {
    key.set(wrong);
    const asked = [];
    whenKeyIsNeeded(async (refused) => {
      asked.push(refused);
      key.set("right");
      return true;
    });
    assert.deepEqual(await listModels(), []);
    assert.deepEqual(asked, [wrong !== ""]);
  }
});

/** Asks as a page at `base` does. */
function fetchFrom(base) {
  const asks = globalThis.fetch;
  return (path, options) => asks(new URL(path, base), options);
}

test("the load is read out of the server's own metrics, and a counter that begins anew is no load", () => {
  assert.deepEqual(loadOf(readFileSync("metrics.txt", "utf8")), { running: 5, waiting: 3, tokens: 70 });
  assert.equal(rateBetween({ time: 0, tokens: 10 }, { time: 2000, tokens: 30 }), 10);
  assert.equal(rateBetween({ time: 0, tokens: 10 }, { time: 2000, tokens: 0 }), 0);
});
