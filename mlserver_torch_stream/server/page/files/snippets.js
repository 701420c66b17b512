// Writes a request as a command or a script to copy. No key is ever in it.

const PYTHON_KEY = `, "Authorization": f"Bearer {os.environ['KEY']}"`;

/** `base`: the address of the server, with its last slash. `keyed`: whether the server asks for a key. */
export const SNIPPETS = {
  curl: ({ path, body }, base, keyed) => {
    const header = keyed ? ` -H "Authorization: Bearer $KEY"` : "";
    return `curl -N ${quoted(base + path)}${header} -H 'Content-Type: application/json' -d ${quoted(json(body))}\n`;
  },
  Python: ({ path, body }, base, keyed) =>
    [
      "import json",
      ...(keyed ? ["import os"] : []),
      "import urllib.request",
      "",
      `body = json.loads(r${pythonString(json(body))})`,
      `headers = {"Content-Type": "application/json"${keyed ? PYTHON_KEY : ""}}`,
      `request = urllib.request.Request("${base}${path}", json.dumps(body).encode(), headers)`,
      "with urllib.request.urlopen(request) as events:",
      "    for line in events:",
      '        if line.startswith(b"data: {"):',
      '            for choice in json.loads(line[6:])["choices"]:',
      `                text = choice${path.includes("chat") ? '["delta"].get("content")' : '["text"]'}`,
      '                print(text or "", end="", flush=True)',
      "",
    ].join("\n"),
  "openai SDK": ({ path, body }, base, keyed) => {
    const { known, extra } = split(body);
    const options = Object.entries(known).map(([name, value]) => `    ${name}=${python(value)},`);
    if (Object.keys(extra).length) options.push(`    extra_body=${python(extra)},`);
    const chat = path.includes("chat");
    return [
      ...(keyed ? ["import os", ""] : []),
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url="${base}v1", api_key=${keyed ? 'os.environ["KEY"]' : '"none"'})`,
      `chunks = client.${chat ? "chat.completions" : "completions"}.create(`,
      ...options,
      ")",
      "for chunk in chunks:",
      "    for choice in chunk.choices:",
      `        print(choice.${chat ? "delta.content" : "text"} or "", end="", flush=True)`,
      "",
    ].join("\n");
  },
};

// What the SDK's methods take by name; the rest goes into `extra_body`.
const OF_THE_SDK = new Set(
  (
    "model stream stream_options messages prompt temperature top_p max_tokens seed stop logprobs top_logprobs n " +
    "presence_penalty frequency_penalty logit_bias tools tool_choice response_format echo"
  ).split(" "),
);

function split(body) {
  const entries = Object.entries(body);
  return {
    known: Object.fromEntries(entries.filter(([name]) => OF_THE_SDK.has(name))),
    extra: Object.fromEntries(entries.filter(([name]) => !OF_THE_SDK.has(name))),
  };
}

const json = (value) => JSON.stringify(value);
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** JSON escapes what a Python string may not hold, but for quotes, which are escaped for JSON. */
const pythonString = (text) => `'''${text.replaceAll("'", "\\u0027")}'''`;

/** A JSON value as Python writes it. Strings are the same in both: JSON.stringify escapes no pair of surrogates. */
function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value)
    .map(([name, each]) => `${JSON.stringify(name)}: ${python(each)}`)
    .join(", ")}}`;
}
