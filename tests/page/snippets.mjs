// Prints the snippets of the requests that come as JSON on the standard input. Run by test_page_units.py.

import { readFileSync } from "node:fs";

import { SNIPPETS } from "./files/snippets.js";

const [request, base, keyed] = JSON.parse(readFileSync(0, "utf8"));
const written = Object.entries(SNIPPETS).map(([kind, write]) => [kind, write(request, base, keyed)]);
process.stdout.write(JSON.stringify(Object.fromEntries(written)));
