// The part of Markdown that models write, as elements. Every text becomes a text node.

import { element } from "./dom.js";

const FENCE = /^(`{3,}|~{3,})\s*([\w+-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s](?:.*?[^*\s])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

// A fragment for `text`, which may still be growing: an open fence is closed at its end.
export function render(text) {
  const made = document.createDocumentFragment();
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const inside = [];
      at += 1;
      while (at < lines.length && !lines[at].startsWith(fence[1])) inside.push(lines[at++]);
      at += 1;
      made.append(element("pre", {}, element("code", {}, inside.join("\n"))));
      continue;
    }
    const heading = HEADING.exec(line);
    if (heading) {
      made.append(element(`h${Math.min(heading[1].length + 2, 6)}`, {}, inline(heading[2])));
      at += 1;
      continue;
    }
    if (BULLET.test(line)) {
      const first = BULLET.exec(line);
      const list = element(first[1] ? "ol" : "ul", first[1] ? { start: Number(first[1]) } : {});
      for (let item; at < lines.length && (item = BULLET.exec(lines[at])); at += 1) {
        list.append(element("li", {}, inline(item[2])));
      }
      made.append(list);
      continue;
    }
    if (!line.trim()) {
      at += 1;
      continue;
    }
    const paragraph = [];
    while (at < lines.length && lines[at].trim() && !FENCE.test(lines[at])
        && !HEADING.test(lines[at]) && !BULLET.test(lines[at])) paragraph.push(lines[at++]);
    made.append(element("p", {}, inline(paragraph.join("\n"))));
  }
  return made;
}

function inline(text) {
  const made = document.createDocumentFragment();
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    made.append(text.slice(last, match.index));
    last = match.index + match[0].length;
    const [, , code, strong, alsoStrong, emphasis, label, address] = match;
    if (code !== undefined) made.append(element("code", {}, code));
    else if (strong ?? alsoStrong) made.append(element("strong", {}, strong ?? alsoStrong));
    else if (emphasis !== undefined) made.append(element("em", {}, emphasis));
    else made.append(element("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, label));
  }
  made.append(text.slice(last));
  return made;
}
