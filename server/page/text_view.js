// Shows text while it grows. Each line is an element of its own, and only the line that grows is drawn again, so the
// work for an answer grows with its length and no faster.
import { button, copyText, el } from "./dom.js";
import { inlineParts, isClosingFence, lineKind, openingFence } from "./markdown.js";

const LONGEST_HELD = 80; // characters of a line that may begin or end a code block; longer ones are shown meanwhile
const LONGEST = 800; // characters of a line that are still drawn again; earlier ones stay as they are
const BOUNDS = [0.9, 0.6, 0.3, 0.1]; // probabilities where the shade of a token changes

export class TextView {
  #root;
  #tokens;
  #formatted;
  #unseen = []; // pieces since the last drawing
  #pieces = []; // of the line that grows
  #line = null; // its element
  #body = null; // where its text goes
  #frozen = 0; // nodes of it that are not drawn again
  #frozenText = ""; // what they show, with its marks
  #code = null; // the element of the code block that is open
  #numTicks = 0; // backticks that opened it

  /** `tokens`: what is known of the tokens that pieces name (see `tokens.js`). */
  constructor(root, { tokens = [], formatted = true } = {}) {
    this.#root = root;
    this.#tokens = tokens;
    this.#formatted = formatted;
  }

  append(pieces) {
    this.#unseen.push(...pieces);
  }

  /** Draw what has come since the last time. */
  draw() {
    const unseen = this.#unseen;
    if (!unseen.length) return;
    this.#unseen = [];
    for (const { text, token } of unseen) {
      const lines = text.split("\n");
      lines.forEach((part, index) => {
        if (part) this.#pieces.push({ text: part, token });
        if (index < lines.length - 1) this.#closeLine();
      });
    }
    this.#drawLine(false);
  }

  /** Nothing more comes: what is held back of the last line is drawn, too. */
  end() {
    this.draw();
    if (this.#pieces.length) this.#closeLine();
  }

  #closeLine() {
    this.#drawLine(true);
    this.#pieces = [];
    this.#line = this.#body = null;
    this.#frozen = 0;
    this.#frozenText = "";
  }

  #drawLine(isComplete) {
    if (!this.#pieces.length && !isComplete) return;
    const text = this.#pieces.map((piece) => piece.text).join("");
    const whole = this.#frozenText + text;
    if (this.#formatted && (isComplete || whole.length <= LONGEST_HELD) && this.#isFence(whole)) {
      this.#line?.remove();
      this.#line = null;
      if (isComplete) this.#passFence(whole);
      return; // it begins or ends a box once it is complete
    }
    const isPlain = this.#code || !this.#formatted || this.#frozen;
    const { kind, skip, mark, depth } = isPlain ? { kind: "plain", skip: 0 } : lineKind(text);
    if (!this.#line) {
      this.#line = el("div");
      (this.#code ?? this.#root).append(this.#line);
    }
    if (!this.#frozen) {
      this.#line.className = `line ${this.#code ? "code-line" : kind}`;
      this.#body = kind === "item" ? el("span", { class: "item-text" }) : this.#line;
      if (kind === "item") {
        this.#line.style.setProperty("--depth", Math.min(depth, 8));
        this.#line.replaceChildren(el("span", { class: "item-mark" }, mark), this.#body);
      }
    }
    while (this.#body.childNodes.length > this.#frozen) this.#body.lastChild.remove();
    this.#body.append(...this.#nodes(text, skip));
    if (text.length > LONGEST && !isComplete) {
      this.#pieces = [];
      this.#frozenText = whole;
      this.#frozen = this.#body.childNodes.length;
    }
  }

  #isFence(text) {
    return this.#code ? isClosingFence(text, this.#numTicks) : openingFence(text) !== null;
  }

  #passFence(text) {
    if (this.#code) {
      this.#code = null;
      return;
    }
    const { numTicks, label } = openingFence(text);
    const code = el("code");
    const copy = button("Copy", () => copyText([...code.children].map((line) => line.textContent).join("\n"), "Code"));
    const head = el("div", { class: "code-head" }, el("span", {}, label || "code"), copy);
    this.#root.append(el("div", { class: "code-block" }, head, el("pre", {}, code)));
    this.#code = code;
    this.#numTicks = numTicks;
  }

  /** The line's text, cut where its style or its token changes. */
  #nodes(text, skip) {
    const isPlain = this.#code || !this.#formatted;
    const parts = isPlain ? [{ start: 0, end: text.length, style: "" }] : inlineParts(text, skip);
    const nodes = [];
    let index = 0;
    let start = 0; // of the piece
    for (const part of parts) {
      const inside = [];
      while (index < this.#pieces.length) {
        const piece = this.#pieces[index];
        const end = start + piece.text.length;
        const cut = text.slice(Math.max(start, part.start), Math.min(end, part.end));
        if (cut) this.#add(inside, cut, piece.token);
        if (end > part.end) break;
        start = end;
        index += 1;
      }
      if (part.style) nodes.push(el(part.style, {}, ...inside));
      else nodes.push(...inside);
    }
    return nodes;
  }

  #add(nodes, text, number) {
    const last = nodes.at(-1);
    if (number === null) {
      if (typeof last === "string") nodes[nodes.length - 1] = last + text;
      else nodes.push(text);
      return;
    }
    const probability = Math.exp(this.#tokens[number].logprob);
    const shade = BOUNDS.filter((bound) => probability < bound).length;
    nodes.push(el("span", { class: `token shade-${shade}`, "data-token": number }, text));
  }
}
