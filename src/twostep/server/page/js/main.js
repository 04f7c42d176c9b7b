// Starts the page: which model is served, whether it is ready, and which view is shown.

import { call, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { EngineView } from "./engine.js";

const POLL_MS = 1000;
const CALM_POLL_MS = 10000;

const chat = new Chat();
const engine = new EngineView(byId("view-engine"));

function showView(name) {
  for (const view of ["chat", "engine"]) {
    byId(`view-${view}`).hidden = view !== name;
    byId(`tab-${view}`).setAttribute("aria-selected", String(view === name));
  }
  engine.setVisible(name === "engine");
}

function showStatus(text, kind) {
  const status = byId("status");
  status.textContent = text;
  status.className = `status ${kind}`;
}

async function poll() {
  let wait = POLL_MS;
  try {
    const { data } = await call("v1/models");
    const model = data[0];
    chat.model = model.id;
    byId("model").textContent = `${model.id}, context ${model.max_model_len ?? "?"}`;
    showStatus("ready", "ready");
    wait = CALM_POLL_MS;
    if (!poll.hasDefaults) {
      poll.hasDefaults = true;
      call("server_info").then((info) => chat.controls.showDefaults(info.default_sampling_params ?? {})).catch(() => {});
    }
  } catch (error) {
    if (error.status === 401) {
      chat.needsKey = true;
      showStatus("API key needed", "bad");
    } else if (error.status === 503) showStatus(error.message, "");
    else showStatus("no connection", "bad");
  }
  setTimeout(poll, wait);
}

byId("tab-chat").addEventListener("click", () => showView("chat"));
byId("tab-engine").addEventListener("click", () => showView("engine"));
byId("key-button").addEventListener("click", () => byId("key-dialog").showModal());
byId("key-dialog").addEventListener("close", () => {
  if (byId("key-dialog").returnValue !== "ok") return;
  chat.needsKey = byId("key-input").value !== "";
  setApiKey(byId("key-input").value, byId("key-remember").checked);
  byId("key-input").value = "";
  poll();
});

poll();
