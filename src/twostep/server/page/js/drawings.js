// The pictures of the engine view, each on a canvas of its own.

import { element } from "./dom.js";

const HOST_LANES = ["planning", "launch", "sampling", "wait", "update", "output"];
const LANE_COLOURS = {
  planning: "--lane-schedule", launch: "--lane-launch", sampling: "--lane-launch", wait: "--lane-wait",
  update: "--lane-update", output: "--lane-update", forward: "--lane-forward", logits: "--lane-logits", sample: "--lane-sample",
};

const hues = new Map();

// A colour for each request, far from its neighbours'.
export function colourOf(id) {
  if (!hues.has(id)) hues.set(id, (hues.size * 137.508) % 360);
  return `hsl(${hues.get(id).toFixed(0)} 65% 55%)`;
}

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Drawing {
  constructor(height, label) {
    this.height = height;
    this.element = element("canvas", { role: "img", "aria-label": label });
  }

  // A context in CSS pixels, cleared.
  begin() {
    const ratio = window.devicePixelRatio || 1;
    const width = this.element.clientWidth || 800;
    this.element.width = Math.round(width * ratio);
    this.element.height = Math.round(this.height * ratio);
    this.element.style.height = `${this.height}px`;
    const context = this.element.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    this.width = width;
    return context;
  }

  onPick(find, pick) {
    this.element.addEventListener("click", (event) => {
      const found = find(event.offsetX, event.offsetY);
      if (found) pick(found);
    });
  }
}

// One column for each step: its tokens, stacked by request; a square-root scale keeps decodes visible.
export class Budget extends Drawing {
  constructor(onSelect) {
    super(170, "Tokens of the budget by request, the last 60 steps");
    this.boxes = [];
    this.onPick((x, y) => this.boxes.find((box) => x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + box.h)?.id, onSelect);
  }

  draw(plans, budget, selected) {
    const context = this.begin();
    this.boxes = [];
    const left = 46, top = 8, bottom = this.height - 20;
    const scale = (tokens) => (bottom - top) * Math.sqrt(Math.min(tokens, budget) / budget);
    context.fillStyle = variable("--muted");
    context.strokeStyle = variable("--line");
    for (const mark of [budget, Math.round(budget / 4), Math.max(1, Math.round(budget / 64))]) {
      const y = bottom - scale(mark);
      context.fillText(String(mark), 4, y + 4);
      context.beginPath();
      context.moveTo(left, y);
      context.lineTo(this.width, y);
      context.stroke();
    }
    const step = (this.width - left) / 60;
    plans.forEach((plan, index) => {
      const x = left + index * step;
      let below = 0;
      for (const [id, tokens] of plan.planned) {
        const y = bottom - scale(below + tokens);
        const box = { id, x, y, w: Math.max(1, step - 1), h: Math.max(1, bottom - scale(below) - y) };
        context.globalAlpha = selected && selected !== id ? 0.25 : 1;
        context.fillStyle = colourOf(id);
        context.fillRect(box.x, box.y, box.w, box.h);
        this.boxes.push(box);
        below += tokens;
      }
      context.globalAlpha = 1;
    });
    context.fillStyle = variable("--muted");
    if (plans.length) context.fillText(`step ${plans[0].step_id} … ${plans.at(-1).step_id}`, left, this.height - 5);
  }
}

// Two lanes over the same time: the host's thread and the device.
export class Lanes extends Drawing {
  constructor() {
    super(110, "What the host and the device did in the last steps");
    const names = [["planning", "planning"], ["launch", "launch, sampling"], ["wait", "wait"], ["update", "update, output"],
      ["forward", "forward"], ["logits", "logits"], ["sample", "sample"]];
    this.legend = element("div", { className: "legend" }, ...names.map(([lane, text]) => {
      const mark = element("i");
      mark.style.background = `var(${LANE_COLOURS[lane]})`;
      return element("span", {}, mark, text);
    }));
  }

  draw(spans, steps) {
    const context = this.begin();
    const shown = spans.filter(([step]) => step >= (steps[0] ?? Infinity));
    context.fillStyle = variable("--muted");
    context.fillText("host", 4, 30);
    context.fillText("device", 4, 66);
    if (!shown.length) return;
    const start = Math.min(...shown.map((span) => span[3]));
    const end = Math.max(...shown.map((span) => span[4]));
    const left = 54;
    const scale = (time) => left + ((time - start) / Math.max(end - start, 1e-6)) * (this.width - left - 6);
    for (const [step, lane, name, from, to] of shown) {
      const isHost = HOST_LANES.includes(lane);
      context.fillStyle = variable(LANE_COLOURS[isHost ? lane : name] ?? "--lane-wait");
      context.fillRect(scale(from), isHost ? 14 : 50, Math.max(0.7, scale(to) - scale(from)), 24);
      if (!isHost && name === "forward" && scale(to) - scale(from) > 30) {
        context.fillStyle = variable("--ground");
        context.fillText(String(step), scale(from) + 4, 66);
      }
    }
    context.fillStyle = variable("--muted");
    context.fillText(`${(1000 * (end - start)).toFixed(1)} ms`, left, 96);
  }
}

// Every block, or every n-th of a large cache, row by row; a request's blocks have its colour.
export class BlockMap extends Drawing {
  constructor(onSelect) {
    super(40, "KV blocks: free, findable, held, shared");
    this.map = null;
    this.cells = [];
    this.legend = element("div", { className: "legend" });
    this.onPick((x, y) => this.at(x, y), onSelect);
  }

  take(map) {
    this.map = map;
    this.cells = [];
    for (const [state, owner, count] of map.runs) {
      for (let i = 0; i < count; i += 1) this.cells.push([state, owner]);
    }
  }

  at(x, y) {
    const index = Math.floor(y / this.size) * this.columns + Math.floor(x / this.size);
    const owner = this.cells[index]?.[1] ?? -1;
    return owner >= 0 ? this.map.owners[owner] : null;
  }

  draw(selected) {
    if (!this.map) return;
    const width = this.element.clientWidth || 800;
    this.size = Math.max(3, Math.min(12, Math.floor(Math.sqrt((width * 180) / this.cells.length))));
    this.columns = Math.max(1, Math.floor(width / this.size));
    this.height = Math.ceil(this.cells.length / this.columns) * this.size + 2;
    const context = this.begin();
    const free = variable("--line"), found = variable("--muted"), ground = variable("--text");
    const counts = [0, 0, 0, 0];
    this.cells.forEach(([state, owner], index) => {
      counts[state] += 1;
      const x = (index % this.columns) * this.size, y = Math.floor(index / this.columns) * this.size;
      const id = owner >= 0 ? this.map.owners[owner] : null;
      context.globalAlpha = selected && id !== selected ? 0.3 : 1;
      context.fillStyle = state === 0 ? free : state === 1 ? found : colourOf(id);
      context.fillRect(x, y, this.size - 1, this.size - 1);
      if (state === 3) {
        context.fillStyle = ground;
        context.fillRect(x + this.size / 2 - 1, y + this.size / 2 - 1, 1.5, 1.5);
      }
    });
    context.globalAlpha = 1;
    const coarse = this.map.cell > 1 ? `, one cell for ${this.map.cell}` : "";
    this.legend.textContent = `${this.map.num_blocks - 1} blocks${coarse}: free ${counts[0]}, free and findable ${counts[1]}, `
      + `held ${counts[2]}, shared ${counts[3]} (dotted)`;
  }
}
