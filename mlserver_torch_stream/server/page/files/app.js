// Puts the page together: the models, the field for messages, the panel, and the conversation.

import { key, listModels } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, element } from "./dom.js";
import { installKeyDialog } from "./key_dialog.js";
import { LoadView } from "./load.js";
import { Settings } from "./settings.js";
import { SNIPPETS } from "./snippets.js";

const EXAMPLES = {
  chat: [
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a lighthouse in the fog.",
    "Give me five names for a small bakery.",
  ],
  completion: [
    "The capital of France is",
    "Once upon a time there was a lighthouse that",
    "The three laws of motion are",
  ],
};
const LOOK_AGAIN_MS = 3000;
const NEAR_PX = 80;

const settings = new Settings();
const scroller = byId("scroller");
const prompt = byId("prompt");
const wide = matchMedia("(min-width: 64rem)");
let models = [];
let follows = true;

const conversation = new Conversation(byId("turns"), {
  model: () => chosenModel(),
  settings: () => {
    const read = settings.read();
    if (!read) openPanel(true);
    return read;
  },
  asked: () => {
    follows = true;
    leaveControls();
  },
  changed: showState,
  snippet: (request, kind) => SNIPPETS[kind](request, new URL(".", location.href).href, Boolean(key.get())),
});

const chosenModel = () => models.find((model) => model.id === byId("model").value) ?? null;

// The models

async function loadModels() {
  try {
    models = await listModels();
    showModels(models.length ? "" : "No model that writes text is loaded.");
  } catch (error) {
    models = [];
    showModels(error.message);
    if (error.status === 401) return; // the next try asks for a key again, so it is the person's
  }
  if (!models.length) setTimeout(loadModels, LOOK_AGAIN_MS);
}

function showModels(problem) {
  const select = byId("model");
  const options = models.map((model) => element("option", { value: model.id }, model.id));
  select.replaceChildren(...(options.length ? options : [element("option", {}, "No model")]));
  select.disabled = !models.length;
  showChoice(problem);
}

function showChoice(problem = "") {
  const model = chosenModel();
  document.body.classList.toggle("completes", model?.chats === false);
  const kind = model?.chats === false ? "completion" : "chat";
  byId("mode-hint").textContent =
    kind === "completion" ? "This model has no chat template: it goes on with your text. " : "";
  byId("empty-text").classList.toggle("error-text", Boolean(problem));
  byId("empty-text").textContent = problem || "Answers come from this server, token by token.";
  const buttons = EXAMPLES[kind].map((text) =>
    element("button", { type: "button", onclick: () => conversation.send(text) }, text),
  );
  const again = element("button", { type: "button", onclick: loadModels }, "Try again");
  byId("examples").replaceChildren(...(model ? buttons : [again]).map((button) => element("li", {}, button)));
  showState();
}

// The conversation

/** The focus goes where the next message is written, but on touch screens, where a keyboard would cover the answer. */
function leaveControls() {
  (matchMedia("(hover: hover)").matches ? prompt : scroller).focus();
}

function showState() {
  byId("empty").hidden = conversation.turns.length > 0;
  byId("new-chat").hidden = conversation.turns.length === 0;
  document.body.classList.toggle("answering", conversation.isRunning);
  const hadFocus = document.activeElement === byId("stop");
  byId("stop").hidden = !conversation.isRunning;
  byId("send").hidden = conversation.isRunning;
  byId("send").disabled = !prompt.value.trim() || !chosenModel();
  if (hadFocus && !conversation.isRunning) leaveControls();
  if (follows) scroller.scrollTop = scroller.scrollHeight;
}

scroller.addEventListener("scroll", () => {
  follows = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
});

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (conversation.send(prompt.value)) prompt.value = "";
  grow();
});

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("composer").requestSubmit();
});

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  showState();
}

prompt.addEventListener("input", grow);
byId("stop").addEventListener("click", () => conversation.stop());
function stopByKey(event) {
  const closes = document.querySelector("dialog[open]") || (isPanelOpen() && !wide.matches); // Escape is for these
  if (event.key === "Escape" && conversation.isRunning && !closes) conversation.stop();
}

document.addEventListener("keydown", stopByKey, true); // before the panel closes
byId("model").addEventListener("change", () => showChoice());
byId("new-chat").addEventListener("click", () => {
  conversation.clear();
  prompt.focus();
});

// The panel and the colours

function openPanel(open) {
  document.body.classList.toggle("panel-open", open);
  byId("panel-toggle").setAttribute("aria-expanded", String(open));
  byId("main").inert = open && !wide.matches; // the panel covers it
  if (!wide.matches) (open ? byId("panel-close") : byId("panel-toggle")).focus();
}

const isPanelOpen = () => document.body.classList.contains("panel-open");
byId("panel-toggle").addEventListener("click", () => openPanel(!isPanelOpen()));
byId("panel-close").addEventListener("click", () => openPanel(false));
byId("panel").addEventListener("keydown", (event) => event.key === "Escape" && !wide.matches && openPanel(false));
wide.addEventListener("change", () => openPanel(wide.matches));

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function showTheme() {
  byId("theme").setAttribute("aria-pressed", String(isDark()));
}

byId("theme").addEventListener("click", () => {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("torch-stream-theme", next);
  } catch {
    // a browser that stores nothing: until the page is left
  }
  showTheme();
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
installKeyDialog(() => loadModels());
if (wide.matches) openPanel(true);
showTheme();
loadModels();
new LoadView(isPanelOpen).run();
