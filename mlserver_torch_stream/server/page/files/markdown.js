// Shows a little Markdown: paragraphs, headings, lists, code, bold. Everything else stays the text that it is: no
// links, no images, no HTML. A text that grows keeps the elements of the blocks that did not change.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(```|~~~)/;
const ITEM = /^ {0,3}(?:([-*+])|(\d{1,9})[.)]) +(.*)$/;
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

/** Makes `container` show `text`. */
export function showMarkdown(container, text) {
  const blocks = blocksOf(text);
  const shown = container.shownBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && blocks[same] === shown[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...blocks.slice(same).map(blockElement));
  container.shownBlocks = blocks;
}

/** The sources of the blocks, in order. A fence that is not closed goes to the end. */
export function blocksOf(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const close = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = FENCE.exec(line)?.[1];
    if (fence) {
      lines.push(line);
      if (mark === fence) {
        close();
        fence = null;
      }
    } else if (mark) {
      close();
      lines.push(line);
      fence = mark;
    } else if (!line.trim()) {
      close();
    } else {
      const begins = ITEM.test(line) !== ITEM.test(lines.at(-1) ?? line) && ITEM.test(line);
      if (begins || /^#{1,6} /.test(line) || /^#{1,6} /.test(lines.at(-1) ?? "")) close();
      lines.push(line);
    }
  }
  close();
  return blocks;
}

function blockElement(source) {
  const lines = source.split("\n");
  if (FENCE.test(lines[0])) {
    const closed = lines.length > 1 && FENCE.test(lines.at(-1));
    const code = lines.slice(1, closed ? -1 : undefined).join("\n");
    return element("pre", { tabIndex: 0 }, element("code", {}, code));
  }
  const heading = /^#{1,6} +(.*)$/.exec(source);
  if (heading) return element("p", { class: "heading" }, ...inline(heading[1]));
  if (ITEM.test(lines[0])) return listElement(lines);
  return element("p", {}, ...inline(source));
}

function listElement(lines) {
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item) items.push(item[3]);
    else items[items.length - 1] += `\n${line.trim()}`;
  }
  const number = ITEM.exec(lines[0])[2];
  const list = number === undefined ? element("ul") : element("ol", { start: Number(number) });
  list.append(...items.map((item) => element("li", {}, ...inline(item))));
  return list;
}

function inline(text) {
  return text.split(INLINE).map((part, i) => {
    if (i % 2 === 0) return part;
    return part[0] === "`" ? element("code", {}, part.slice(1, -1)) : element("strong", {}, part.slice(2, -2));
  });
}
