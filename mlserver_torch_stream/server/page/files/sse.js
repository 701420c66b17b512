// Reads server-sent events out of text that comes in pieces of any size. Knows nothing of what they hold.

export class EventReader {
  #rest = "";

  /** The data of the events that this piece completes. */
  feed(piece) {
    const text = this.#rest + piece;
    // A carriage return at the end may be half of a line's end.
    const whole = text.endsWith("\r") ? text.slice(0, -1) : text;
    const blocks = whole.replace(/\r\n?/g, "\n").split("\n\n");
    this.#rest = blocks.pop() + text.slice(whole.length);
    return blocks.map(dataOf).filter((data) => data !== null);
  }
}

/** The data of one event; null if it has none, as a comment. */
function dataOf(block) {
  const lines = block.split("\n").filter((line) => /^data(:|$)/.test(line));
  return lines.length ? lines.map((line) => line.replace(/^data:? ?/, "")).join("\n") : null;
}
