// The form of a request's settings, and the body that it describes.
import { button, el } from "./dom.js";

const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
];
const PENALTIES = [
  ["presence_penalty", "Presence", { min: -2, max: 2, step: "any" }],
  ["frequency_penalty", "Frequency", { min: -2, max: 2, step: "any" }],
  ["repetition_penalty", "Repetition", { min: 0.01, max: 10, step: "any" }],
];
const NUM_ALTERNATIVES = 5;
const NOT_FURTHER = ["messages", "n", "stream", "stream_options"]; // what the page shows depends on its own values

const EXAMPLE_TOOLS = [
  {
    name: "get_weather",
    description: "Get the weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { capital: { type: "string" }, certain: { type: "boolean" } },
  required: ["capital", "certain"],
};

/** A box of the form holds what cannot be sent. */
export class FieldError extends Error {
  constructor(name, message) {
    super(message);
    this.field = name;
  }
}

/** Says below a box what is wrong with it, until the box changes. */
function errorNote(name) {
  return el("p", { class: "field-error", id: `${name}-error`, role: "alert", hidden: true });
}

function numberField([name, label, limits]) {
  const means = { placeholder: "default", inputmode: "decimal", "aria-describedby": `${name}-error` };
  const input = el("input", { type: "number", name, ...means, ...limits });
  return el("div", {}, el("label", {}, label, input), errorNote(name));
}

function jsonField(name, label, hint, example) {
  const box = el("textarea", { name, rows: 5, spellcheck: "false", class: "code-box", "aria-describedby": `${name}-error` });
  const fill = button("Example", () => {
    box.value = JSON.stringify(example, null, 2);
    box.dispatchEvent(new Event("input", { bubbles: true }));
  });
  const summary = el("summary", {}, label, el("span", { class: "set-mark", "aria-hidden": "true" }));
  const labelled = el("label", { class: "stacked" }, el("span", { class: "hint" }, hint), box);
  const fold = el("details", { "data-fold": name }, summary, labelled, errorNote(name), el("div", { class: "fold-row" }, fill));
  box.addEventListener("input", () => fold.classList.toggle("is-set", box.value.trim() !== ""));
  return fold;
}

export function buildForm(form) {
  const effort = el(
    "select",
    { name: "reasoning_effort" },
    ...["", "low", "medium", "high"].map((value) => el("option", { value }, value || "default")),
  );
  form.append(
    el("label", { class: "stacked" }, "System prompt", el("textarea", { name: "system", rows: 3 })),
    el("fieldset", {}, el("legend", {}, "Sampling"), el("div", { class: "grid" }, ...SAMPLING.map(numberField))),
    el("label", { class: "inline wide-inline" }, "Reasoning effort", effort),
    el(
      "label",
      { class: "check" },
      el("input", { type: "checkbox", name: "logprobs", checked: true }),
      el("span", {}, "Token probabilities: point at a word of the answer"),
    ),
    el(
      "label",
      { class: "check" },
      el("input", { type: "checkbox", name: "shade" }),
      el("span", {}, "Shade words that the model was unsure of"),
    ),
    jsonField("tools", "Tools", "A JSON list of functions", EXAMPLE_TOOLS),
    jsonField("schema", "JSON schema of the answer", "The answer is bound to it", EXAMPLE_SCHEMA),
    el(
      "details",
      {},
      el("summary", {}, "Penalties and stops"),
      el("div", { class: "grid three" }, ...PENALTIES.map(numberField)),
      el("label", { class: "stacked" }, "Stop strings, one a line", el("textarea", { name: "stop", rows: 2 })),
    ),
    jsonField("more", "Further parameters", "A JSON object; its keys are added to the request", { min_tokens: 20 }),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    const note = noteOf(target.name);
    if (note) note.hidden = true;
  });
}

const noteOf = (name) => document.getElementById(`${name}-error`);

function parsed(form, name, label) {
  const text = form.elements[name].value.trim();
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(name, `${label}: this is not JSON (${error.message})`);
  }
}

function toolsOf(form) {
  const given = parsed(form, "tools", "Tools");
  if (given === null) return null;
  const list = Array.isArray(given) ? given : [given];
  return list.map((tool) => (tool?.type === "function" ? tool : { type: "function", function: tool }));
}

function formatOf(form) {
  const given = parsed(form, "schema", "JSON schema");
  if (given === null) return null;
  if (["json_schema", "json_object", "structural_tag"].includes(given.type)) return given;
  return { type: "json_schema", json_schema: { name: "answer", schema: given, strict: true } };
}

/** The system prompt, and the parameters that go beside the messages. Raises FieldError. */
export function readForm(form) {
  const parameters = {};
  for (const [name, label] of [...SAMPLING, ...PENALTIES]) {
    const input = form.elements[name];
    if (!input.validity.valid) throw new FieldError(name, `${label}: ${input.validationMessage}`);
    if (input.value !== "") parameters[name] = Number(input.value);
  }
  if (form.elements.reasoning_effort.value) parameters.reasoning_effort = form.elements.reasoning_effort.value;
  const stop = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stop.length) parameters.stop = stop;
  const tools = toolsOf(form);
  if (tools) parameters.tools = tools;
  const format = formatOf(form);
  if (format) parameters.response_format = format;
  if (form.elements.logprobs.checked) Object.assign(parameters, { logprobs: true, top_logprobs: NUM_ALTERNATIVES });
  const more = parsed(form, "more", "Further parameters");
  if (more !== null && (typeof more !== "object" || Array.isArray(more)))
    throw new FieldError("more", "Further parameters: give a JSON object");
  const own = NOT_FURTHER.find((name) => Object.hasOwn(more ?? {}, name));
  if (own) throw new FieldError("more", `Further parameters: leave out ${own}; the page asks for one streamed answer`);
  return { system: form.elements.system.value.trim(), parameters: { ...parameters, ...more } };
}

/** Show where the form is wrong, and put the cursor there. */
export function showFieldError(form, error) {
  const input = form.elements[error.field];
  const fold = input.closest("details");
  if (fold) fold.open = true;
  const note = noteOf(error.field);
  note.textContent = error.message;
  note.hidden = false;
  input.focus();
}
