// Reads the form of the settings, and keeps what it holds for as long as the tab is open.

import { byId } from "./dom.js";

const STORED = "torch-stream-settings";
const NUMBERS = {
  temperature: [0, 100, false],
  top_p: [0, 1, false],
  max_tokens: [1, 2 ** 31, true],
  seed: [0, Number.MAX_SAFE_INTEGER, true],
};
const LABELS = { temperature: "Temperature", top_p: "Top p", max_tokens: "Most tokens", seed: "Seed" };

export class Settings {
  #form = byId("settings");

  constructor() {
    const stored = JSON.parse(sessionStorage.getItem(STORED) ?? "{}");
    for (const field of this.#form.elements) {
      if (field.type === "checkbox") field.checked = stored[field.name] ?? false;
      else field.value = stored[field.name] ?? "";
    }
    this.#form.addEventListener("input", () => this.#changed());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
  }

  get probabilities() {
    return this.#form.elements.logprobs.checked;
  }

  /** What a request is to have of them; null, with the reason on the page, where one is wrong. */
  read() {
    const fields = this.#form.elements;
    const values = Object.fromEntries([...fields].map((field) => [field.name, field.value]));
    try {
      const read = { ...readSettings(values), ...(this.probabilities && { logprobs: true }) };
      this.#complain(null, "");
      return read;
    } catch (error) {
      this.#complain(error.field, error.message);
      return null;
    }
  }

  #changed() {
    const kept = [...this.#form.elements].map((field) => [
      field.name,
      field.type === "checkbox" ? field.checked : field.value,
    ]);
    sessionStorage.setItem(STORED, JSON.stringify(Object.fromEntries(kept)));
    this.read();
  }

  #complain(name, message) {
    byId("settings-error").textContent = message;
    for (const field of this.#form.elements) {
      field.setAttribute("aria-invalid", String(field.name === name));
      if (field.name === name) field.closest("details")?.setAttribute("open", "");
    }
  }
}

class WrongSetting extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

/** The parameters of a request out of what was typed, without empty fields. Throws with the `field` that is wrong. */
export function readSettings(typed) {
  const read = {};
  if (typed.system.trim()) read.system = typed.system;
  for (const [name, bounds] of Object.entries(NUMBERS)) {
    if (typed[name].trim()) read[name] = readNumber(name, typed[name], ...bounds);
  }
  const stop = typed.stop.split("\n").filter((line) => line);
  if (stop.length) read.stop = stop;
  if (typed.more.trim()) read.more = readObject(typed.more);
  return read;
}

function readNumber(name, text, low, high, whole) {
  const value = Number(text.trim().replace(",", "."));
  const fits = value >= low && value <= high && (!whole || Number.isInteger(value));
  if (!fits)
    throw new WrongSetting(
      name,
      `${LABELS[name]} is ${whole ? "a whole number" : "a number"} from ${low} to ${high}.`,
    );
  return value;
}

function readObject(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new WrongSetting("more", `The further parameters are not JSON: ${error.message}.`);
  }
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new WrongSetting("more", "The further parameters are no JSON object.");
  }
  return value;
}
