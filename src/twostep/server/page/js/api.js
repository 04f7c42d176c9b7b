// Talking to the server: JSON calls, and streams of server-sent events.

const REMEMBERED_KEY = "twostep-api-key";
let apiKey = localStorage.getItem(REMEMBERED_KEY) ?? "";

export function setApiKey(key, remember) {
  apiKey = key;
  if (remember && key) localStorage.setItem(REMEMBERED_KEY, key);
  else localStorage.removeItem(REMEMBERED_KEY);
}

export class ApiError extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function headers(hasBody) {
  const fields = {};
  if (hasBody) fields["Content-Type"] = "application/json";
  if (apiKey) fields["Authorization"] = `Bearer ${apiKey}`;
  return fields;
}

async function send(path, { body, signal } = {}) {
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: headers(body !== undefined),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    const body = await response.json();
    const error = body.error ?? body;
    message = error.message ?? error.detail ?? JSON.stringify(error);
    if (error.phase) message = `${error.phase} ${Math.round(error.percent ?? 0)} %`;
  } catch {
    // The status line has to do.
  }
  return new ApiError(message, response.status, response.headers.get("Retry-After"));
}

// GET without, POST with a body; the answer as an object.
export async function call(path, body, signal) {
  const response = await send(path, { body, signal });
  return response.json();
}

// Yields the data of each event, parsed. Ends with the stream; an aborted signal throws AbortError.
export async function* events(path, body, signal) {
  const response = await send(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value.replaceAll("\r\n", "\n");
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const data = rest.slice(0, end).split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        rest = rest.slice(end + 2);
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
