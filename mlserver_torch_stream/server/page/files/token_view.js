// Shows an answer token by token, and of the token that is pointed at what else was likely. The arrow keys walk over
// the tokens.

import { announceNow } from "./announcer.js";
import { byId, element } from "./dom.js";

const SPECIAL = /^<[|/]?[\w|]+>$/; // as the token that ends an answer
const percent = (share) => (share >= 0.0005 ? `${(share * 100).toFixed(1)} %` : "< 0.1 %");
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

export class TokenView {
  #tokens = [];
  #spans = [];
  #current = -1;

  constructor() {
    this.root = element("div", {
      class: "tokens",
      tabIndex: 0,
      role: "group",
      "aria-label": "The answer by tokens. Left and right arrow keys show how likely each was.",
      onpointerover: (event) => this.#point(event),
      onclick: (event) => this.#point(event),
      onpointerleave: () => this.#leave(),
      onblur: () => this.#leave(),
      onkeydown: (event) => this.#walk(event),
    });
  }

  /** Adds those that are new. */
  show(tokens) {
    const added = tokens.slice(this.#spans.length).map((token) => {
      const level = Math.min(4, Math.floor(token.probability * 5));
      const special = SPECIAL.test(token.text) ? " special" : "";
      return element("span", { class: `token likely-${level}${special}` }, token.text);
    });
    this.root.append(...added);
    this.#spans.push(...added);
    this.#tokens = tokens;
  }

  #point(event) {
    const at = this.#spans.indexOf(event.target);
    if (at >= 0) this.#select(at);
  }

  #walk(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#leave();
    if (!step || !this.#spans.length) return;
    event.preventDefault();
    this.#select(Math.max(0, Math.min(this.#spans.length - 1, this.#current + step)));
    announceNow(spoken(this.#tokens[this.#current]));
  }

  #select(at) {
    this.#spans[this.#current]?.classList.remove("current");
    this.#current = at;
    this.#spans[at].classList.add("current");
    showTip(this.#tokens[at], this.#spans[at]);
  }

  #leave() {
    this.#spans[this.#current]?.classList.remove("current");
    byId("probabilities").hidden = true;
  }
}

function spoken(token) {
  const others = token.others.filter((other) => other.text !== token.text).slice(0, 2);
  const rest = others.map((other) => `${other.text} ${percent(other.probability)}`).join(", ");
  return `${token.text}: ${percent(token.probability)}${rest ? `. Else ${rest}` : ""}`;
}

function showTip(token, span) {
  const tip = byId("probabilities");
  const rows = token.others.some((other) => other.text === token.text) ? token.others : [token, ...token.others];
  tip.replaceChildren(
    ...rows.slice(0, 6).map((row) => {
      const bar = element("i", { class: "bar" });
      bar.style.width = `${Math.max(1, row.probability * 100)}%`;
      return element(
        "div",
        { class: row.text === token.text ? "row chosen" : "row" },
        element("span", { class: "name" }, visible(row.text)),
        element("span", { class: "track" }, bar),
        element("span", { class: "share" }, percent(row.probability)),
      );
    }),
  );
  tip.hidden = false;
  const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const left = Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8));
  const above = place.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : place.bottom + 6}px`;
}
