// The request on the page as something to run elsewhere.

export function asCurl(address, body, needsKey) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = needsKey ? " \\\n  -H \"Authorization: Bearer $API_KEY\"" : "";
  return `curl ${address}/v1/chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${json}'\n`;
}

const OPENAI_NAMES = new Set([
  "model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "stop",
  "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "response_format", "tools", "tool_choice",
]);

export function asPython(address, body, needsKey) {
  const known = [], extra = [];
  for (const [name, value] of Object.entries(body)) {
    if (OPENAI_NAMES.has(name)) known.push(`    ${name}=${python(value, 1)},`);
    else extra.push(`        ${python(name)}: ${python(value, 2)},`);
  }
  if (extra.length) known.push(`    extra_body={\n${extra.join("\n")}\n    },`);
  const key = needsKey ? 'os.environ["API_KEY"]' : '"-"';
  const loop = body.stream
    ? 'for chunk in answer:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="", flush=True)\n'
    : "print(answer.choices[0].message.content)\n";
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI\n\n`
    + `client = OpenAI(base_url="${address}/v1", api_key=${key})\n`
    + `answer = client.chat.completions.create(\n${known.join("\n")}\n)\n${loop}`;
}

function python(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = "    ".repeat(depth + 1);
  const outer = "    ".repeat(depth);
  if (Array.isArray(value)) {
    return value.length ? `[\n${value.map((each) => inner + python(each, depth + 1)).join(",\n")},\n${outer}]` : "[]";
  }
  const entries = Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${python(each, depth + 1)}`);
  return entries.length ? `{\n${entries.join(",\n")},\n${outer}}` : "{}";
}
