// Markdown that is still being written: finished blocks are drawn once, only the tail again.

import { element } from "./dom.js";
import { render } from "./markdown.js";

export class GrowingMarkdown {
  constructor(box) {
    this.box = box;
    this.tail = element("div");
    box.replaceChildren(this.tail);
    this.text = "";
    this.drawn = 0;
  }

  add(text) {
    this.text += text;
  }

  draw() {
    const end = lastBoundary(this.text, this.drawn);
    if (end > this.drawn) {
      this.tail.before(render(this.text.slice(this.drawn, end)));
      this.drawn = end;
    }
    this.tail.replaceChildren(render(this.text.slice(this.drawn)));
  }
}

// Where the last finished block ends: behind an empty line that no open fence or list runs across.
function lastBoundary(text, from) {
  let boundary = from;
  let fence = null;
  let at = from;
  while (at < text.length) {
    const end = text.indexOf("\n", at);
    if (end < 0) break;
    const line = text.slice(at, end);
    const mark = /^(`{3,}|~{3,})/.exec(line);
    if (mark && fence === null) fence = mark[1];
    else if (fence !== null && line.startsWith(fence)) fence = null;
    else if (fence === null && !line.trim()) boundary = end + 1;
    at = end + 1;
  }
  return boundary;
}
