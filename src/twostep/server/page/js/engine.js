// The engine at work: steps, budget, lanes, KV blocks, requests. Asks the server only while visible.

import { events } from "./api.js";
import { element } from "./dom.js";
import { BlockMap, Budget, Lanes, colourOf } from "./drawings.js";
import { Requests } from "./requests.js";

const RETRY_MS = 2000;
const HISTORY_SECONDS = 10;

export class EngineView {
  constructor(box) {
    this.box = box;
    this.abort = null;
    this.isVisible = false;
    this.requests = new Requests((id) => this.select(id));
    this.plans = [];
    this.spans = [];
    this.selected = null;
    this.frame = 0;
    this.build();
    document.addEventListener("visibilitychange", () => this.watchOrNot());
  }

  build() {
    this.note = element("p", { className: "muted", role: "status" }, "");
    this.tiles = new Map();
    const tiles = element("div", { className: "tiles" });
    for (const [key, label] of [
      ["running", "running"], ["waiting", "waiting"], ["kv", "KV cache in use"], ["hits", "prefix cache hits"],
      ["tokens", "tokens planned /s"], ["steps", "steps /s"], ["preemptions", "preemptions"], ["idle", "device idle"],
    ]) {
      const value = element("b", {}, "–");
      this.tiles.set(key, value);
      tiles.append(element("div", { className: "tile" }, value, element("span", {}, label)));
    }
    this.budget = new Budget((id) => this.select(id));
    this.lanes = new Lanes();
    this.map = new BlockMap((id) => this.select(id));
    this.life = element("div");
    this.box.replaceChildren(
      this.note, tiles,
      panel("The last steps: who got which tokens of the budget", this.budget.element),
      panel("Host and device, the last steps", this.lanes.element, this.lanes.legend),
      panel("KV blocks", this.map.element, this.map.legend),
      panel("Requests", element("div", { className: "scroll" }, this.requests.element), this.life));
  }

  setVisible(isVisible) {
    this.isVisible = isVisible;
    this.watchOrNot();
  }

  watchOrNot() {
    const wanted = this.isVisible && !document.hidden;
    if (wanted && !this.abort) this.watch();
    else if (!wanted && this.abort) {
      this.abort.abort();
      this.abort = null;
    }
  }

  async watch() {
    const abort = (this.abort = new AbortController());
    while (!abort.signal.aborted) {
      try {
        for await (const update of events("engine/events", undefined, abort.signal)) this.take(update);
      } catch (error) {
        if (abort.signal.aborted) return;
        this.note.textContent = error.status === 401 ? "An API key is needed to look at the engine." : `no view: ${error.message}`;
      }
      if (!abort.signal.aborted) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  take(update) {
    if (update.error) throw new Error(update.error.message);
    this.note.textContent = update.num_dropped ? `${update.num_dropped} updates were lost: this page was too slow` : "";
    const since = update.time - HISTORY_SECONDS;
    this.plans = [...this.plans, ...update.plans].filter((plan) => plan.time >= since).slice(-400);
    this.spans = [...this.spans, ...update.spans].filter((span) => span[4] >= since).slice(-6000);
    this.requests.take(update);
    if (update.blocks) this.map.take(update.blocks);
    this.update = update;
    this.totals ??= { queries: 0, hits: 0, preemptions: 0 };
    this.totals.queries += update.prefix_cache_queries;
    this.totals.hits += update.prefix_cache_hits;
    this.totals.preemptions += update.num_preemptions;
    this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.draw(); });
  }

  draw() {
    const { update, plans, totals } = this;
    const show = (key, text) => { this.tiles.get(key).textContent = text; };
    show("running", `${update.running.length} / ${update.max_num_seqs}`);
    show("waiting", String(update.num_waiting));
    show("kv", percent(update.kv_cache_usage));
    show("hits", totals.queries ? percent(totals.hits / totals.queries) : "–");
    show("preemptions", String(totals.preemptions));
    const recent = plans.filter((plan) => plan.time >= update.time - 1);
    show("tokens", String(recent.reduce((sum, plan) => sum + plan.num_tokens, 0)));
    show("steps", String(recent.length));
    const idle = idleShare(this.spans.filter(([, lane, , , end]) => lane === "device" && end >= update.time - 2));
    show("idle", idle === null ? "–" : percent(idle, 1));
    this.budget.draw(plans.slice(-60), update.token_budget, this.selected);
    this.lanes.draw(this.spans, plans.slice(-8).map((plan) => plan.step_id));
    this.map.draw(this.selected);
    this.requests.draw(this.selected);
    this.drawLife();
  }

  select(id) {
    this.selected = this.selected === id ? null : id;
    if (this.update) this.draw();
  }

  drawLife() {
    const life = this.selected && this.requests.get(this.selected);
    if (!life) {
      this.life.replaceChildren();
      return;
    }
    const start = life.events[0].time;
    this.life.replaceChildren(
      element("h3", { id: "life" }, swatch(life.id), life.id),
      element("div", { className: "scroll" }, element("table", {},
        element("thead", {}, element("tr", {}, ...["after", "step", "what", "tokens", "computed before"].map((text) => element("th", {}, text)))),
        element("tbody", {}, ...life.events.slice(-200).map((event) => element("tr", {},
          element("td", {}, `${(1000 * (event.time - start)).toFixed(1)} ms`),
          element("td", {}, event.step === null ? "" : String(event.step)),
          element("td", {}, event.times > 1 ? `${event.what} × ${event.times}` : event.what),
          element("td", {}, event.tokens ? String(event.tokens) : ""),
          element("td", {}, event.computed === null ? "" : String(event.computed))))))));
  }
}

function panel(title, ...children) {
  return element("section", { className: "panel" }, element("h2", {}, title), ...children);
}

function swatch(id) {
  const made = element("i");
  Object.assign(made.style, { background: colourOf(id), display: "inline-block", width: ".8rem", height: ".8rem", borderRadius: "3px", marginRight: ".4rem" });
  return made;
}

const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

// Share of the time between the first and the last span in which the device did nothing.
function idleShare(spans) {
  if (spans.length < 3) return null;
  const sorted = spans.map(([, , , start, end]) => [start, end]).sort((a, b) => a[0] - b[0]);
  let busy = 0;
  let until = sorted[0][0];
  for (const [start, end] of sorted) {
    busy += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return 1 - busy / (until - sorted[0][0]);
}
