// One answer of the model: its state, filled from the chunks of the stream, and its place in the page.
import { button, copyText, el, shown } from "./dom.js";
import { attachCards } from "./probabilities.js";
import { TextView } from "./text_view.js";
import { TokenAligner } from "./tokens.js";

const ENDS = {
  stop: "",
  length: "Cut: the answer reached max_tokens or the end of the context.",
  tool_calls: "",
  content_filter: "Cut by a filter.",
};

export class Answer {
  content = "";
  reasoning = "";
  calls = []; // {id, name, arguments}
  finish = null;
  error = null;
  stopped = false;
  #sentMs = performance.now();
  #firstMs = null; // when the first tokens came
  #lastMs = null;
  #numFirst = 0; // how many these were
  #num = 0;
  #aligner = new TokenAligner();
  #drawing = 0;

  /** `request`: the body that was sent. `actions`: nodes of the footer, given this answer. */
  constructor(request, actions) {
    this.request = request;
    this.#build(actions);
  }

  #build(actions) {
    this.reasoningBox = el("div", { class: "reasoning-text" });
    this.fold = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.reasoningBox);
    this.text = el("div", { class: "answer-text" });
    this.callBox = el("div", { class: "calls" });
    this.note = el("p", { class: "answer-note", hidden: true });
    this.stats = el("span", { class: "stats" }, "Waiting for the first token");
    this.actions = el("span", { class: "actions", hidden: true }, ...actions(this));
    this.footer = el("div", { class: "answer-foot" }, this.stats, this.actions);
    this.element = el(
      "article",
      { class: "answer is-busy", "aria-label": "Answer" },
      this.fold, this.text, this.callBox, this.note, this.footer,
    );
    this.reasoningView = new TextView(this.reasoningBox, { formatted: false });
    this.view = new TextView(this.text, { tokens: this.#aligner.tokens });
  }

  /** Nothing came, because of an error or because the reader stopped it at once. */
  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  /** The message as it goes back with the next request. */
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning = this.reasoning;
    if (this.calls.length)
      message.tool_calls = this.calls.map(({ id, name, arguments: text }) => ({
        id, type: "function", function: { name, arguments: text },
      }));
    return message;
  }

  take(chunk) {
    const choice = chunk.choices.find((each) => each.index === 0);
    const delta = choice?.delta ?? {};
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    this.#count(chunk.usage?.completion_tokens ?? this.#num, reasoning || delta.content || delta.tool_calls);
    if (!choice) return this.#draw();
    if (reasoning) {
      this.reasoning += reasoning;
      this.reasoningView.append([{ text: reasoning, token: null }]);
    }
    if (delta.content || choice.logprobs?.content?.length) {
      this.content += delta.content ?? "";
      this.view.append(this.#aligner.push(delta.content ?? "", choice.logprobs?.content ?? []));
    }
    for (const part of delta.tool_calls ?? []) this.#takeCall(part);
    this.finish = choice.finish_reason ?? this.finish;
    this.#draw();
  }

  /** Note when tokens come: not all have text, and text may be held back while they go on. */
  #count(num, hasText) {
    if (num <= this.#num && !hasText) return;
    this.#num = num;
    this.#lastMs = performance.now();
    if (this.#firstMs === null) {
      this.#firstMs = this.#lastMs;
      this.#numFirst = num;
    }
  }

  #takeCall(part) {
    const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }

  #draw() {
    this.#drawing ||= requestAnimationFrame(() => {
      this.#drawing = 0;
      this.#drawNow();
    });
  }

  #drawNow() {
    if (this.reasoning && this.fold.hidden) this.fold.hidden = false;
    const isThinking = !this.content && !this.calls.length && !this.finish;
    if (this.reasoning && this.fold.dataset.thinking !== String(isThinking)) {
      this.fold.dataset.thinking = String(isThinking); // opens while it is all there is, folds when the answer begins
      this.fold.open = isThinking;
    }
    this.#drawReasoning();
    this.view.draw();
    this.#drawCalls();
    this.stats.textContent = this.#statsText();
    this.onDraw?.();
  }

  /** Its box is low and scrolls; while the reader has not scrolled up, its end stays in view. */
  #drawReasoning() {
    const box = this.reasoningBox;
    const follows = this.fold.open && box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    this.reasoningView.draw();
    if (follows) box.scrollTop = box.scrollHeight;
  }

  #drawCalls() {
    this.calls.forEach((call, index) => {
      const card = this.callBox.children[index] ?? this.callBox.appendChild(this.#card());
      card.querySelector(".call-name").textContent = call.name;
      card.querySelector("pre").textContent = this.finish ? pretty(call.arguments) : call.arguments;
    });
  }

  #card() {
    const label = el("span", { class: "call-label" }, "Tool call");
    const head = el("div", { class: "call-head" }, label, el("code", { class: "call-name" }));
    return el("div", { class: "call" }, head, el("pre", {}));
  }

  #statsText() {
    const isOver = this.finish || this.error;
    if (this.#firstMs === null) return isOver ? "No tokens" : "Waiting for the first token";
    const parts = [];
    if (this.#num) parts.push(`${shown(this.#num)} token${this.#num === 1 ? "" : "s"}`);
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    const more = this.#num - this.#numFirst;
    if (seconds > 0 && more > 0) parts.push(`${shown(more / seconds)} tokens/s`);
    parts.push(`first token ${shown(Math.round(this.#firstMs - this.#sentMs))} ms`);
    return parts.join("  ·  ");
  }

  /** Nothing more comes. `error`: what the service said; `stopped`: the reader ended it. */
  end({ error = null, stopped = false } = {}) {
    this.error = error;
    this.stopped = stopped;
    cancelAnimationFrame(this.#drawing);
    this.view.append(this.#aligner.end());
    this.view.end();
    this.finish ??= stopped ? "stopped" : null;
    this.#drawNow();
    this.element.classList.remove("is-busy");
    this.actions.hidden = false;
    if (this.#aligner.tokens.length) attachCards(this.text, this.#aligner.tokens);
    if (stopped) this.#say("Stopped.", "muted");
    else if (error) this.#showError(error);
    else if (ENDS[this.finish]) this.#say(ENDS[this.finish], "warning");
    else if (!this.content && !this.calls.length) this.#say("The answer is empty.", "muted");
  }

  #say(text, kind) {
    this.note.textContent = text;
    this.note.dataset.kind = kind;
    this.note.hidden = false;
  }

  #showError(error) {
    this.#say("", "error");
    const status = error.status >= 400 ? el("strong", {}, `${error.status} `) : null;
    const saysWhen = /\bagain\b/i.test(error.message);
    const wait = error.retryAfterS && !saysWhen ? ` Try again in ${error.retryAfterS} s.` : "";
    this.note.append(...[status].filter(Boolean), error.message + wait);
    this.note.setAttribute("role", "alert");
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** A question of the reader, with the means to change it. */
export function questionElement(text, onEdit) {
  const body = el("div", { class: "question-text" }, text);
  const actions = el(
    "span",
    { class: "actions" },
    button("Edit", onEdit),
    button("Copy", () => copyText(text, "Question")),
  );
  return el("article", { class: "question", "aria-label": "Question" }, body, actions);
}
