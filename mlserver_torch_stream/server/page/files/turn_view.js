// Shows one turn: what was asked, the answer as it grows, and what can be done with them.

import { copyText, element } from "./dom.js";
import { announceNow } from "./announcer.js";
import { showMarkdown } from "./markdown.js";
import { SNIPPETS } from "./snippets.js";
import { TokenView } from "./token_view.js";

const ENDS = { length: "cut off at the most tokens", tool_calls: "asks for tools", content_filter: "filtered" };

export class TurnView {
  /** `actions`: `edit(turn, prompt)`, `regenerate(turn)`, and `snippet(turn, kind)`, which gives the text to copy. */
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.root = element("li", { class: "turn" });
    this.reset();
  }

  /** Shows the turn anew, as for another answer. */
  reset() {
    this.tokens = null;
    this.text = element("div", { class: "text" });
    this.reasoningText = element("div", { class: "reasoning-text" });
    this.reasoning = element(
      "details",
      { class: "aside", hidden: true },
      element("summary", {}, "Reasoning"),
      this.reasoningText,
    );
    this.calls = element("div", { class: "calls" });
    this.problem = element("div", { class: "problem", role: "alert", hidden: true });
    this.figures = element("p", { class: "figures" });
    this.tools = element("div", { class: "actions", hidden: true }, ...this.#answerActions());
    this.answer = element(
      "article",
      { class: "answer", "aria-label": "Answer" },
      ...[this.reasoning, this.text, this.calls, this.problem, element("footer", {}, this.figures, this.tools)],
    );
    this.prompt = element("article", { class: "prompt", "aria-label": "You" }, ...this.#promptParts());
    this.root.replaceChildren(this.prompt, this.answer);
  }

  update() {
    const answer = this.turn.answer;
    this.answer.setAttribute("aria-busy", String(!answer.ended));
    this.answer.classList.toggle("waits", !answer.ended && answer.isEmpty);
    this.#showReasoning(answer);
    this.#showText(answer);
    this.calls.replaceChildren(...answer.toolCalls.map(callElement));
    this.#showProblem(answer.error);
    this.figures.textContent = figuresOf(answer);
    this.tools.hidden = !answer.ended || answer.isEmpty;
  }

  #showReasoning(answer) {
    this.reasoning.hidden = !answer.reasoning;
    if (this.reasoningText.textContent === answer.reasoning) return;
    this.reasoningText.textContent = answer.reasoning;
    this.reasoning.open = !answer.text;
  }

  #showText(answer) {
    if (!answer.tokens.length) return showMarkdown(this.text, answer.text);
    if (!this.tokens) {
      this.tokens = new TokenView();
      this.text.replaceChildren(this.tokens.root);
    }
    this.tokens.show(answer.tokens);
  }

  #showProblem(error) {
    this.problem.hidden = !error;
    if (!error || this.problem.childNodes.length) return;
    const when = error.retryAfter == null ? "" : ` It asks to wait ${error.retryAfter} s.`;
    const again = element(
      "button",
      { type: "button", onclick: () => this.actions.regenerate(this.turn) },
      "Try again",
    );
    this.problem.append(element("p", {}, `${error.message}${when}`), again);
  }

  #promptParts() {
    const edit = element("button", { type: "button", class: "edit", onclick: () => this.#beginEdit() }, "Edit");
    return [element("p", { class: "prompt-text" }, this.turn.prompt), element("div", { class: "actions" }, edit)];
  }

  #beginEdit() {
    const area = element("textarea", { value: this.turn.prompt, rows: 3, "aria-label": "Edit the message" });
    const cancel = () => {
      this.prompt.replaceChildren(...this.#promptParts());
      this.prompt.querySelector(".edit").focus();
    };
    const send = (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(this.turn, area.value);
    };
    const keys = (event) => {
      if (event.key === "Escape") cancel();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
    };
    area.addEventListener("keydown", keys);
    const buttons = [
      element("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
      element("button", { type: "submit", class: "primary" }, "Send"),
    ];
    this.prompt.replaceChildren(
      element("form", { class: "editing", onsubmit: send }, area, element("div", { class: "row" }, ...buttons)),
    );
    area.focus();
  }

  #answerActions() {
    const copy = copyButton("Copy", () => this.turn.answer.text);
    const again = element(
      "button",
      { type: "button", class: "regenerate", onclick: () => this.actions.regenerate(this.turn) },
      "Regenerate",
    );
    const kinds = Object.keys(SNIPPETS).map((kind) => copyButton(kind, () => this.actions.snippet(this.turn, kind)));
    const menu = element("div", { class: "menu", role: "group", "aria-label": "Copy the request as" }, ...kinds);
    return [copy, again, element("details", { class: "copy-as" }, element("summary", {}, "Copy as"), menu)];
  }
}

function copyButton(label, text) {
  const button = element("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    const done = await copyText(text());
    button.textContent = done ? "Copied" : "Not copied";
    announceNow(button.textContent);
    setTimeout(() => (button.textContent = label), 1500);
  });
  return button;
}

function callElement(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // not complete yet, or no JSON: as it came
  }
  return element(
    "div",
    { class: "call" },
    element("p", {}, "Calls ", element("code", {}, call.name)),
    element("pre", { tabIndex: 0 }, shown),
  );
}

function figuresOf(answer) {
  const parts = [];
  if (answer.firstTokenMs !== null) parts.push(`first token ${inUnits(answer.firstTokenMs)}`);
  if (answer.tokenCount)
    parts.push(`${answer.isCounted ? "" : "≈ "}${answer.tokenCount} token${answer.tokenCount === 1 ? "" : "s"}`);
  if (answer.tokensPerSecond !== null) parts.push(`${answer.tokensPerSecond.toFixed(1)} tokens/s`);
  if (answer.stopped) parts.push("stopped");
  else if (ENDS[answer.finishReason]) parts.push(ENDS[answer.finishReason]);
  return parts.join(" · ");
}

const inUnits = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
