// The conversation: sending, stopping, asking again, results of tools, and going back to an earlier question.
import { Answer, questionElement } from "./answer.js";
import { ApiError, PATHS, keys, streamChat } from "./api.js";
import { button, byId, copyText, el, hideTip } from "./dom.js";
import { askForKeys } from "./key_dialog.js";
import { setPanel } from "./panel.js";
import { FieldError, readForm, showFieldError } from "./request.js";
import { asCurl, asPython } from "./snippets.js";
import { known } from "./watch.js";

const EXAMPLES = [
  "What is the capital of France?",
  "What is 123 + 456?",
  "Sort these words: pear, apple, fig, cherry",
];

// {kind: "question", text, element}, {kind: "answer", answer, element}, {kind: "result", id, text, element}
let turns = [];
let running = null; // AbortController of the answer that is being written
let follows = true; // keep the end of the answer in view

const form = () => byId("settings");
const welcome = byId("welcome");

export function startChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendPrompt();
  });
  const prompt = byId("prompt");
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sendPrompt();
  });
  prompt.addEventListener("input", fitPrompt);
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", newChat);
  document.addEventListener("keydown", (event) => {
    const isForOthers = event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]");
    if (event.key === "Escape" && !isForOthers) stop();
  });
  byId("examples").append(...EXAMPLES.map((text) => button(text, () => sendExample(text), "example")));
  const messages = byId("messages");
  messages.addEventListener("scroll", () => {
    follows = messages.scrollHeight - messages.scrollTop - messages.clientHeight < 60;
  });
  form().elements.shade.addEventListener("change", (event) => messages.classList.toggle("shades", event.target.checked));
}

function fitPrompt() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
}

function setPrompt(text) {
  byId("prompt").value = text;
  fitPrompt();
  byId("prompt").focus();
}

function stop() {
  running?.abort();
}

function newChat() {
  stop();
  turns = [];
  redraw();
  byId("prompt").focus();
}

function redraw() {
  hideTip(); // its word may go
  byId("messages").replaceChildren(...(turns.length ? turns.map((turn) => turn.element) : [welcome]));
}

function add(turn) {
  turns.push(turn);
  welcome.remove();
  byId("messages").append(turn.element);
  toEnd(true);
}

function toEnd(always) {
  const messages = byId("messages");
  if (always || follows) messages.scrollTop = messages.scrollHeight;
}

function sendPrompt() {
  const text = byId("prompt").value.trim();
  if (text) sendQuestion(text, () => setPrompt(""));
}

/** What is in the box stays there. */
function sendExample(text) {
  sendQuestion(text, () => byId("prompt").focus());
}

/** `onSent` runs if no answer is being written and the settings are right. */
function sendQuestion(text, onSent) {
  if (running) return;
  const settings = readSettings();
  if (!settings) return;
  const turn = { kind: "question", text };
  turn.element = questionElement(text, () => edit(turn));
  add(turn);
  onSent();
  ask(settings);
}

/** Put an earlier question back into the box; what followed it is dropped. */
function edit(turn) {
  const draft = byId("prompt").value.trim();
  if (draft && draft !== turn.text && !confirm("Replace the text in the message box by this question?")) return;
  stop();
  turns = turns.slice(0, turns.indexOf(turn));
  redraw();
  setPrompt(turn.text);
}

/** The form's settings, or null after showing what is wrong with them. */
function readSettings() {
  try {
    return readForm(form());
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    setPanel(true);
    showFieldError(form(), error);
    return null;
  }
}

function messages(system) {
  const list = system ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.kind === "question") list.push({ role: "user", content: turn.text });
    else if (turn.kind === "answer" && !turn.answer.isEmpty) list.push(turn.answer.message);
    else if (turn.kind === "result") list.push({ role: "tool", tool_call_id: turn.id, content: turn.text });
  }
  return list;
}

function actionsOf(answer) {
  const page = new URL(".", document.baseURI).href;
  const hasKey = () => Boolean(keys.client || keys.admin);
  const curl = () => copyText(asCurl(page + PATHS.chat, answer.request, hasKey()), "curl command");
  const python = () => copyText(asPython(`${page}v1`, answer.request, hasKey()), "Python program");
  return [
    button("Regenerate", () => regenerate(answer), "quiet regenerate"),
    button("Copy", () => copyText(answer.content, "Answer")),
    button("as curl", curl, "quiet as-curl"),
    button("as Python", python, "quiet as-python"),
  ];
}

/** Drop an answer and what followed it, and ask again. */
function regenerate(answer) {
  if (running) return;
  const settings = readSettings();
  if (!settings) return;
  turns = turns.slice(0, turns.findIndex((turn) => turn.answer === answer));
  redraw();
  ask(settings);
}

async function ask({ system, parameters }) {
  const request = {
    ...(known.health ? { model: known.health.models[0] } : {}),
    messages: messages(system),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    ...parameters,
  };
  const answer = new Answer(request, actionsOf);
  answer.onDraw = () => toEnd(false);
  add({ kind: "answer", answer, element: answer.element });
  const control = new AbortController();
  setRunning(control);
  let end = {};
  try {
    for await (const chunk of streamChat(request, control.signal)) answer.take(chunk);
  } catch (error) {
    if (error.name === "AbortError") end = { stopped: true };
    else if (error instanceof ApiError) end = { error };
    else throw error;
  } finally {
    setRunning(null);
    answer.end(end);
  }
  if (end.error?.status === 401) askForKeys(end.error.message, () => regenerate(answer));
  else if (answer.finish === "tool_calls") offerResults(answer);
  toEnd(false);
}

/** *Send* and *Stop* take each other's place, also for the keyboard: what had the focus may be gone. */
function setRunning(control) {
  running = control;
  const [comes, goes] = control ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")];
  const isLost = document.activeElement === goes || (control && document.activeElement === document.body);
  comes.hidden = false;
  goes.hidden = true;
  if (isLost) comes.focus({ preventScroll: true });
}

/** Below an answer that calls tools: a box for each result, and a button that sends them. */
function offerResults(answer) {
  const boxes = answer.calls.map((call) =>
    el("textarea", { rows: 2, class: "code-box", "aria-label": `Result of ${call.name}`, placeholder: `Result of ${call.name}` }),
  );
  boxes.forEach((box, index) => answer.callBox.children[index].append(box));
  const send = button("Send results and go on", () => {
    if (running) return;
    const settings = readSettings();
    if (!settings) return;
    turns = turns.slice(0, turns.findIndex((turn) => turn.answer === answer) + 1);
    redraw();
    boxes.forEach((box, index) => {
      box.readOnly = true;
      turns.push({ kind: "result", id: answer.calls[index].id, text: box.value, element: el("span", { hidden: true }) });
    });
    send.remove();
    ask(settings);
  }, "primary");
  answer.callBox.append(send);
  boxes[0]?.focus({ preventScroll: true });
}
