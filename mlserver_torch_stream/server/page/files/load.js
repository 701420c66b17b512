// Draws the server's load of the last minute, while somebody can see it.

import { key, readMetrics } from "./api.js";
import { byId } from "./dom.js";
import { loadOf, rateBetween } from "./metrics.js";

const PERIOD_MS = 1000;
const WINDOW = 60; // readings
const WIDTH = 240;
const HEIGHT = 56;
const SVG = "http://www.w3.org/2000/svg";

export class LoadView {
  #readings = [];

  /** `isShown`: whether the charts can be seen. */
  constructor(isShown) {
    this.isShown = isShown;
    this.waiting = series("chart-sequences", "waiting", false);
    this.running = series("chart-sequences", "running", true);
    this.rate = series("chart-tokens", "running", true);
  }

  async run() {
    for (;;) {
      if (!document.hidden && this.isShown()) await this.#read();
      await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
    }
  }

  async #read() {
    try {
      const now = { ...loadOf(await readMetrics()), time: performance.now() };
      const before = this.#readings.at(-1);
      this.#readings.push({ ...now, rate: before ? rateBetween(before, now) : 0 });
      this.#readings = this.#readings.slice(-WINDOW);
      this.#draw();
      note("The last 60 seconds, of all models.");
    } catch (error) {
      if (error.status === 404) note("This server shows no metrics here.");
      else note(error.status === 401 ? needsKey() : "The load cannot be read at the moment.");
    }
  }

  #draw() {
    const { running, waiting, rate } = this.#readings.at(-1);
    byId("running").textContent = running;
    byId("waiting").textContent = waiting;
    byId("rate").textContent = rate.toFixed(rate < 10 ? 1 : 0);
    const most = { sequences: this.#most("running", "waiting"), rate: this.#most("rate") };
    this.running(
      this.#readings.map((each) => each.running),
      Math.max(4, most.sequences),
    );
    this.waiting(
      this.#readings.map((each) => each.waiting),
      Math.max(4, most.sequences),
    );
    this.rate(
      this.#readings.map((each) => each.rate),
      Math.max(10, most.rate),
    );
    byId("most-sequences").textContent = `most ${most.sequences}`;
    byId("most-rate").textContent = `most ${Math.round(most.rate)}`;
    name("chart-sequences", `Now ${running} running and ${waiting} waiting; at most ${most.sequences} lately`);
    name("chart-tokens", `Now ${Math.round(rate)} tokens per second; at most ${Math.round(most.rate)} lately`);
  }

  #most(...names) {
    return Math.max(...this.#readings.flatMap((each) => names.map((name) => each[name])));
  }
}

const note = (text) => (byId("load-note").textContent = text);
const name = (id, text) => byId(id).setAttribute("aria-label", text);
const needsKey = () => (key.get() ? "The server does not take this key." : "The load is shown with a key.");

/** A line in a chart, with or without an area below it; returns what draws values up to a highest one. */
function series(id, className, filled) {
  const shapes = (filled ? ["polygon", "polyline"] : ["polyline"]).map((tag) => {
    const shape = document.createElementNS(SVG, tag);
    shape.setAttribute("class", className);
    byId(id).append(shape);
    return shape;
  });
  return (values, highest) => {
    const x = (i) => WIDTH - ((values.length - 1 - i) * WIDTH) / (WINDOW - 1);
    const y = (value) => HEIGHT - 2 - (value / highest) * (HEIGHT - 6);
    const line = values.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    for (const shape of shapes) {
      const area = `${x(0).toFixed(1)},${HEIGHT} ${line} ${WIDTH},${HEIGHT}`;
      shape.setAttribute("points", shape.tagName === "polygon" ? area : line);
    }
  };
}
