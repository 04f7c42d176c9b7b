// The requests that a watcher has seen, each with its life.

import { element } from "./dom.js";
import { colourOf } from "./drawings.js";

const MOST = 200;

export class Requests {
  constructor(onSelect) {
    this.lives = new Map();
    this.onSelect = onSelect;
    this.body = element("tbody");
    this.element = element("table", { id: "requests" },
      element("thead", {}, element("tr", {}, ...["", "request", "state", "prompt", "computed", "cached", "steps", "preempted", "age"]
        .map((text) => element("th", {}, text)))),
      this.body);
  }

  get(id) {
    return this.lives.get(id);
  }

  life(id, time) {
    let life = this.lives.get(id);
    if (!life) {
      life = { id, state: "running", prompt: null, computed: 0, cached: 0, steps: 0, preempted: 0, first: time, last: time, events: [] };
      this.lives.set(id, life);
    }
    life.last = time;
    return life;
  }

  take(update) {
    const turns = [
      ...update.events.map(([time, id, what, tokens]) => ({ time, id, what, tokens, event: true })),
      ...update.plans,
    ].sort((a, b) => a.time - b.time);
    for (const turn of turns) {
      if (turn.event) this.takeEvent(turn);
      else this.takePlan(turn);
    }
    for (const id of update.running) this.life(id, update.time).state = "running";
    for (const id of update.waiting) this.life(id, update.time).state = "waiting";
    for (const life of this.lives.values()) {
      const isThere = update.running.includes(life.id) || update.waiting.includes(life.id);
      if (!isThere && (life.state === "running" || (life.state === "waiting" && update.num_waiting <= update.waiting.length))) {
        life.state = "gone";
      }
    }
    this.forgetOld();
  }

  takeEvent({ time, id, what, tokens }) {
    const life = this.life(id, time);
    if (what === "arrived") {
      life.prompt = tokens;
      life.state = "waiting";
    } else life.state = what;
    life.events.push({ time, step: null, what, tokens, computed: null, times: 1 });
  }

  takePlan(plan) {
    for (const id of plan.preempted) {
      const life = this.life(id, plan.time);
      life.preempted += 1;
      life.events.push({ time: plan.time, step: plan.step_id, what: "preempted", tokens: 0, computed: null, times: 1 });
    }
    for (const [id, tokens, computed, kind] of plan.planned) {
      const life = this.life(id, plan.time);
      if (kind === "new" && !life.steps) life.cached = computed;
      life.steps += 1;
      life.computed = computed + tokens;
      const last = life.events.at(-1);
      if (kind === "decode" && last?.what === "decode") {
        last.times += 1;
        last.tokens += tokens;
      } else {
        const what = kind === "new" ? (life.preempted ? "resumed" : computed ? "started, prefix found" : "started") : kind;
        life.events.push({ time: plan.time, step: plan.step_id, what, tokens, computed, times: 1 });
      }
    }
  }

  forgetOld() {
    const ended = [...this.lives.values()].filter((life) => life.state !== "running" && life.state !== "waiting");
    for (const life of ended.slice(0, Math.max(0, this.lives.size - MOST))) this.lives.delete(life.id);
  }

  draw(selected) {
    const lives = [...this.lives.values()].sort((a, b) => rank(a) - rank(b) || b.first - a.first).slice(0, 60);
    this.body.replaceChildren(...lives.map((life) => {
      const mark = element("i");
      Object.assign(mark.style, { background: colourOf(life.id), display: "inline-block", width: ".8rem", height: ".8rem", borderRadius: "3px" });
      const row = element("tr", { className: "clickable", tabIndex: 0, "aria-selected": String(life.id === selected),
        onclick: () => this.onSelect(life.id),
        onkeydown: (event) => { if (event.key === "Enter") this.onSelect(life.id); } },
        element("td", {}, mark), element("td", { className: "mono" }, life.id), element("td", {}, life.state),
        ...[life.prompt ?? "?", life.computed, life.cached, life.steps, life.preempted].map((value) => element("td", {}, String(value))),
        element("td", {}, `${(life.last - life.first).toFixed(1)} s`));
      if (life.id === selected) row.style.outline = "2px solid var(--accent)";
      return row;
    }));
  }
}

const rank = ({ state }) => (state === "running" ? 0 : state === "waiting" ? 1 : 2);
