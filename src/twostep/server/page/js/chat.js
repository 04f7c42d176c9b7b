// The playground: a conversation with the model that is being served.

import { ApiError, events } from "./api.js";
import { Controls, readJson } from "./controls.js";
import { byId, copy, element, toast } from "./dom.js";
import { asCurl, asPython } from "./export.js";
import { MessageView } from "./message.js";
import * as store from "./store.js";

export class Chat {
  constructor() {
    this.model = "";
    this.needsKey = false;
    this.controls = new Controls(() => this.keepSettings());
    this.conversation = newConversation();
    this.views = [];
    this.running = null;
    this.wire();
    this.restoreSettings();
    this.showHistory();
  }

  wire() {
    byId("composer").addEventListener("submit", (event) => { event.preventDefault(); this.submit(); });
    byId("input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.submit(); }
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => this.open(newConversation()));
    byId("export-chats").addEventListener("click", () => this.exportAll());
    byId("import-chats").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.importAll(event.target.files[0]));
    byId("system").addEventListener("input", () => this.keepSettings());
    byId("copy-json").addEventListener("click", () => this.copyRequest((body) => JSON.stringify(body, null, 2)));
    byId("copy-curl").addEventListener("click", () => this.copyRequest((body) => asCurl(here(), body, this.needsKey)));
    byId("copy-python").addEventListener("click", () => this.copyRequest((body) => asPython(here(), body, this.needsKey)));
  }

  // ------------------------------------------------------------------ the request

  // The body of the next request. Throws with words for the user if a setting is wrong.
  request(messages) {
    const body = { model: this.model, messages, stream: true, stream_options: { include_usage: true } };
    Object.assign(body, this.controls.values());
    const schema = readJson("schema", "JSON schema", (value) =>
      typeof value === "object" && value !== null && !Array.isArray(value) ? "" : "a schema is an object");
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    const tools = readJson("tools", "Tools", (value) => (Array.isArray(value) && value.length ? "" : "tools are a list"));
    if (tools) body.tools = tools;
    return body;
  }

  wireMessages() {
    const system = byId("system").value.trim();
    const said = this.conversation.messages.filter((message) => !message.error || message.content).map(toWire);
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  copyRequest(format) {
    const draft = byId("input").value.trim();
    const messages = this.wireMessages();
    if (draft || !messages.length) messages.push({ role: "user", content: draft || "Hello" });
    try {
      copy(format(this.request(messages)));
    } catch (error) {
      toast(error.message);
    }
  }

  // ------------------------------------------------------------------ talking

  async submit() {
    const input = byId("input");
    const text = input.value.trim();
    if (!text || this.running) return;
    this.push({ role: "user", content: text });
    input.value = "";
    await this.answer();
  }

  async answer() {
    let body;
    try {
      body = this.request(this.wireMessages());
    } catch (error) {
      toast(error.message);
      return;
    }
    const message = { role: "assistant", content: "", reasoning: "", tokens: [], toolCalls: [] };
    const view = this.push(message);
    const abort = new AbortController();
    this.setRunning(abort);
    const painter = new Painter(view);
    try {
      await this.receive(body, message, view, painter, abort.signal);
    } catch (error) {
      if (abort.signal.aborted) message.stopped = true;
      else message.error = wordsFor(error);
    } finally {
      painter.stop();
      view.draw();
      view.finish();
      this.setRunning(null);
      await this.keep();
    }
  }

  async receive(body, message, view, painter, signal) {
    const started = performance.now();
    let first = null;
    let last = null;
    const figures = message.figures = {
      ttft: null, rate: null, completionTokens: null, promptTokens: null, cachedTokens: 0,
      finishReason: null, stopReason: null, requestId: null,
    };
    for await (const chunk of events("v1/chat/completions", body, signal)) {
      if (chunk.error) throw new ApiError(chunk.error.message ?? String(chunk.error), 200);
      figures.requestId = chunk.id ?? figures.requestId;
      if (chunk.usage) {
        figures.completionTokens = chunk.usage.completion_tokens;
        figures.promptTokens = chunk.usage.prompt_tokens;
        figures.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      }
      for (const choice of chunk.choices ?? []) {
        const { content, reasoning, tool_calls: calls } = choice.delta ?? {};
        if (content || reasoning || calls) {
          last = performance.now();
          first ??= last;
          figures.ttft = first - started;
        }
        if (content || reasoning) view.add({ content: content ?? "", reasoning: reasoning ?? "" });
        for (const call of calls ?? []) addCall(message.toolCalls, call);
        for (const token of choice.logprobs?.content ?? []) {
          message.tokens.push({ token: token.token, logprob: token.logprob, top: token.top_logprobs ?? [] });
        }
        if (choice.finish_reason) {
          figures.finishReason = choice.finish_reason;
          figures.stopReason = choice.stop_reason ?? null;
        }
      }
      if (figures.completionTokens > 1 && last > first) {
        figures.rate = (1000 * (figures.completionTokens - 1)) / (last - first);
      }
      painter.wake();
    }
    if (!figures.finishReason) throw new ApiError("the connection was lost before the answer was complete", 0);
  }

  stop() {
    this.running?.abort();
  }

  setRunning(abort) {
    this.running = abort;
    byId("stop").hidden = abort === null;
    byId("send").disabled = abort !== null;
    byId("messages").setAttribute("aria-busy", String(abort !== null));
  }

  edit(message) {
    if (this.running) return;
    byId("input").value = message.content;
    this.cutFrom(message);
    byId("input").focus();
  }

  regenerate(message) {
    if (this.running) return;
    this.cutFrom(message);
    this.answer();
  }

  toolResult(message, call, text) {
    if (this.running) return;
    call.answered = true;
    this.viewOf(message).finish();
    this.push({ role: "tool", content: text, toolCallId: call.id });
    if (message.toolCalls.every((each) => each.answered)) this.answer();
  }

  // ------------------------------------------------------------------ what is on the page

  push(message) {
    this.conversation.messages.push(message);
    return this.show(message);
  }

  show(message) {
    const view = new MessageView(message, {
      edit: (each) => this.edit(each),
      regenerate: (each) => this.regenerate(each),
      toolResult: (each, call, text) => this.toolResult(each, call, text),
    });
    this.views.push(view);
    byId("messages").append(view.element);
    view.element.scrollIntoView({ block: "end" });
    return view;
  }

  viewOf(message) {
    return this.views.find((view) => view.message === message);
  }

  cutFrom(message) {
    const { messages } = this.conversation;
    messages.splice(messages.indexOf(message));
    for (const view of this.views.splice(messages.length)) view.element.remove();
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.views = [];
    byId("messages").replaceChildren();
    for (const message of conversation.messages) this.show(message);
    this.showHistory();
    byId("input").focus();
  }

  // ------------------------------------------------------------------ what is kept

  async keep() {
    const { conversation } = this;
    const firstWords = conversation.messages.find(({ role }) => role === "user")?.content ?? "";
    conversation.title = firstWords.slice(0, 60);
    conversation.changed = Date.now();
    await store.save(structuredClone(conversation)).catch((error) => toast(`not kept: ${error.message}`));
    this.showHistory();
  }

  async showHistory() {
    let kept = [];
    try {
      kept = await store.all();
    } catch {
      // A browser without storage: the page works, and forgets.
    }
    byId("history").replaceChildren(...kept.map((conversation) => element("li", {},
      element("button", {
        type: "button",
        className: `quiet${conversation.id === this.conversation.id ? " current" : ""}`,
        onclick: () => this.open(conversation),
      }, conversation.title || "empty"),
      element("button", {
        type: "button", className: "quiet", "aria-label": `Delete ${conversation.title}`,
        onclick: async () => {
          await store.remove(conversation.id);
          if (conversation.id === this.conversation.id) this.open(newConversation());
          else this.showHistory();
        },
      }, "×"))));
  }

  async exportAll() {
    const blob = new Blob([JSON.stringify(await store.all(), null, 2)], { type: "application/json" });
    const link = element("a", { href: URL.createObjectURL(blob), download: "twostep-conversations.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  async importAll(file) {
    if (!file) return;
    try {
      const conversations = JSON.parse(await file.text());
      for (const each of conversations) {
        if (typeof each.id !== "string" || !Array.isArray(each.messages)) throw new Error("not an export of this page");
        await store.save(each);
      }
      toast(`${conversations.length} imported`);
    } catch (error) {
      toast(`not imported: ${error.message}`);
    }
    byId("import-file").value = "";
    this.showHistory();
  }

  // Settings travel in the address, so that a link shares them.
  keepSettings() {
    const settings = this.controls.toText();
    const system = byId("system").value;
    if (system) settings.system = system;
    const hash = Object.keys(settings).length ? `#${new URLSearchParams(settings)}` : location.pathname + location.search;
    history.replaceState(null, "", hash);
  }

  restoreSettings() {
    const settings = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    byId("system").value = settings.system ?? "";
    this.controls.fromText(settings);
  }
}

// Draws a growing answer once per frame, and follows it unless the reader has scrolled up.
class Painter {
  constructor(view) {
    this.view = view;
    this.frame = 0;
    this.box = byId("messages");
  }

  wake() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      const follows = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 80;
      this.view.draw();
      if (follows) this.box.scrollTop = this.box.scrollHeight;
    });
  }

  stop() {
    cancelAnimationFrame(this.frame);
  }
}

const here = () => location.origin + location.pathname.replace(/\/$/, "");

const newConversation = () => ({ id: crypto.randomUUID?.() ?? String(Date.now()), title: "", changed: 0, messages: [] });

function toWire({ role, content, toolCalls, toolCallId }) {
  if (role === "tool") return { role, content, tool_call_id: toolCallId };
  if (!toolCalls?.length) return { role, content };
  return {
    role, content: content || null,
    tool_calls: toolCalls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })),
  };
}

function addCall(calls, delta) {
  const call = (calls[delta.index] ??= { id: "", name: "", arguments: "" });
  call.id = delta.id ?? call.id;
  call.name = delta.function?.name ?? call.name;
  call.arguments += delta.function?.arguments ?? "";
}

function wordsFor(error) {
  if (error instanceof ApiError && error.status === 401) return "This server wants an API key: see the button at the top.";
  if (error instanceof ApiError) return error.message;
  return `The server cannot be reached (${error.message}).`;
}
