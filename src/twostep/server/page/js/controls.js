// The sampling controls: an empty field is left out of the request, and the server's default holds.

import { byId, element } from "./dom.js";

const FIELDS = [
  { name: "temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", min: -1, max: 1000000, step: 1, whole: true },
  { name: "min_p", min: 0, max: 1, step: 0.05 },
  { name: "max_tokens", min: 1, max: 10000000, step: 1, whole: true },
  { name: "seed", min: -9223372036854775000, max: 9223372036854775000, step: 1, whole: true },
  { name: "presence_penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", min: 0.01, max: 100, step: 0.05 },
  { name: "stop", text: true },
  { name: "top_logprobs", min: 0, max: 20, step: 1, whole: true },
];

export class Controls {
  constructor(onChange) {
    this.inputs = new Map();
    const box = byId("sampling");
    for (const field of FIELDS) {
      const input = element("input", {
        id: `field-${field.name}`,
        type: field.text ? "text" : "number",
        min: field.min, max: field.max, step: field.step,
        placeholder: field.text ? "text" : "default",
        oninput: () => { this.check(field, input); onChange(); },
      });
      const hint = element("span", { className: "hint", role: "alert" });
      box.append(element("div", { className: "field" },
        element("label", { htmlFor: input.id }, field.name), input, hint));
      this.inputs.set(field.name, { field, input, hint });
    }
  }

  // What a request without a value gets, in grey.
  showDefaults(defaults) {
    for (const [name, { input }] of this.inputs) {
      if (defaults[name] !== undefined && defaults[name] !== null) input.placeholder = String(defaults[name]);
    }
  }

  check(field, input) {
    const { hint } = this.inputs.get(field.name);
    const value = Number(input.value);
    const bad = !field.text && input.value !== ""
      && (!Number.isFinite(value) || value < field.min || value > field.max || (field.whole && !Number.isInteger(value)));
    hint.textContent = bad ? `${field.min} to ${field.max}${field.whole ? ", whole" : ""}` : "";
    input.setAttribute("aria-invalid", String(bad));
    return !bad;
  }

  // The fields of a request that were set. Throws for one out of range.
  values() {
    const made = {};
    for (const [name, { field, input }] of this.inputs) {
      if (input.value === "") continue;
      if (!this.check(field, input)) throw new Error(`${name} is out of range`);
      if (name === "stop") made.stop = [input.value.replaceAll("\\n", "\n")];
      else if (name === "top_logprobs") Object.assign(made, { logprobs: true, top_logprobs: Number(input.value) });
      else made[name] = Number(input.value);
    }
    return made;
  }

  // For the address bar: settings can be shared as a link.
  toText() {
    return Object.fromEntries([...this.inputs].filter(([, { input }]) => input.value !== "")
      .map(([name, { input }]) => [name, input.value]));
  }

  fromText(values) {
    for (const [name, { field, input }] of this.inputs) {
      if (values[name] === undefined) continue;
      input.value = values[name];
      this.check(field, input);
    }
  }
}

// The value of a JSON editor: undefined if empty; shows what is wrong and throws.
export function readJson(id, what, check) {
  const text = byId(id).value.trim();
  const problem = byId(`${id}-problem`);
  problem.textContent = "";
  if (!text) return undefined;
  try {
    const value = JSON.parse(text);
    const wrong = check(value);
    if (wrong) throw new Error(wrong);
    return value;
  } catch (error) {
    problem.textContent = error.message;
    throw new Error(`${what}: ${error.message}`);
  }
}
