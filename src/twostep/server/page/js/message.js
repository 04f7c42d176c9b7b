// One message on the page.

import { copy, element } from "./dom.js";
import { GrowingMarkdown } from "./growing.js";

// message: {role, content, reasoning?, toolCalls?, tokens?, figures?, error?, stopped?}
// on: {edit(message), regenerate(message), toolResult(message, call, text)}
export class MessageView {
  constructor(message, on) {
    this.message = message;
    this.on = on;
    this.body = element("div", { className: "body" });
    this.thinking = element("details", { hidden: true }, element("summary", {}, "Thinking"),
      element("div", { className: "thinking" }));
    this.calls = element("div");
    this.problem = element("p", { className: "error", role: "alert", hidden: true });
    this.figures = element("div", { className: "figures" });
    this.showsTokens = false;
    this.element = element("article", { className: `message ${message.role}`, "data-role": message.role },
      element("div", { className: "who" }, message.role), this.thinking, this.body, this.calls, this.problem, this.figures);
    this.growing = message.role === "assistant" ? new GrowingMarkdown(this.body) : null;
    if (this.growing) this.growing.add(message.content ?? "");
    this.draw();
    this.finish();
  }

  // A piece of the answer, as it arrives. Nothing is drawn before `draw`.
  add({ content = "", reasoning = "" }) {
    this.message.content += content;
    this.message.reasoning = (this.message.reasoning ?? "") + reasoning;
    this.growing.add(content);
  }

  draw() {
    const { message } = this;
    if (this.showsTokens) this.body.replaceChildren(tokenView(message.tokens));
    else if (this.growing) this.growing.draw();
    else this.body.textContent = message.content;
    if (message.reasoning) {
      this.thinking.hidden = false;
      this.thinking.lastChild.textContent = message.reasoning;
    }
    this.problem.hidden = !message.error;
    this.problem.textContent = message.error ?? "";
  }

  // The answer is complete, or was cut: calls, figures and buttons.
  finish() {
    const { message } = this;
    this.calls.replaceChildren(...(message.toolCalls ?? []).map((call) => this.callView(call)));
    const buttons = [];
    if (message.role === "user") {
      buttons.push(element("button", { className: "quiet", onclick: () => this.on.edit(message) }, "Edit"));
    }
    if (message.role === "assistant") {
      buttons.push(
        element("button", { className: "quiet", onclick: () => this.on.regenerate(message) }, "Regenerate"),
        element("button", { className: "quiet", onclick: () => copy(message.content) }, "Copy"));
      if (message.tokens?.length) {
        buttons.push(element("button", { className: "quiet", onclick: () => this.toggleTokens() }, "Tokens"));
      }
    }
    const texts = figureTexts(message).map((text) => element("span", {}, text));
    this.figures.replaceChildren(...texts, ...buttons);
  }

  toggleTokens() {
    this.showsTokens = !this.showsTokens;
    if (!this.showsTokens) {
      this.growing = new GrowingMarkdown(this.body);
      this.growing.add(this.message.content);
    }
    this.draw();
  }

  callView(call) {
    const result = element("textarea", { rows: 2, placeholder: "result of the call", "aria-label": `Result of ${call.name}` });
    return element("div", { className: "call" },
      element("div", {}, element("strong", {}, call.name), element("span", { className: "muted" }, ` ${call.id}`)),
      element("pre", {}, element("code", {}, pretty(call.arguments))),
      call.answered ? element("span", { className: "muted" }, "answered") : element("div", {}, result,
        element("p", { className: "row" }, element("button", {
          type: "button",
          onclick: () => this.on.toolResult(this.message, call, result.value),
        }, "Send result"))));
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function figureTexts({ figures, stopped }) {
  if (!figures) return stopped ? ["stopped"] : [];
  const texts = [];
  if (figures.ttft !== null) texts.push(`first token ${Math.round(figures.ttft)} ms`);
  if (figures.rate !== null) texts.push(`${figures.rate.toFixed(1)} tok/s`);
  if (figures.completionTokens !== null) texts.push(`${figures.completionTokens} tokens`);
  if (figures.promptTokens !== null) {
    texts.push(`prompt ${figures.promptTokens}${figures.cachedTokens ? `, ${figures.cachedTokens} cached` : ""}`);
  }
  texts.push(stopped ? "stopped" : `ended by ${figures.finishReason}${figures.stopReason ? ` (${figures.stopReason})` : ""}`);
  if (figures.requestId) texts.push(figures.requestId);
  return texts;
}

// Every token with its probability as colour; the candidates on hover or focus.
function tokenView(tokens) {
  return element("div", { className: "tokens" }, ...tokens.map((token) => {
    const probability = Math.exp(token.logprob);
    const top = token.top.map(({ token: text, logprob }) =>
      `${(100 * Math.exp(logprob)).toFixed(1).padStart(5)} %  ${JSON.stringify(text)}`).join("\n");
    const made = element("span", { className: "token", tabIndex: 0 }, token.token,
      element("span", { className: "top" }, `${(100 * probability).toFixed(1)} % ${JSON.stringify(token.token)}\n${top}`));
    made.style.borderBottomColor = `hsl(${Math.round(120 * probability)} 70% 45%)`;
    return made;
  }));
}
