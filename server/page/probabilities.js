// The card of a token: how likely it was, and what else might have come. With the pointer, or arrow keys in the text.
import { el, hideTip, showTip } from "./dom.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  if (share < 0.01) return "<0.01 %";
  return `${share >= 99.95 ? "100" : share.toPrecision(3).slice(0, 4).replace(/\.$/, "")} %`;
};

/** A token so that spaces and line breaks can be seen. */
const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(no text)";

function rowsOf(token) {
  const rows = token.top.map(({ token: text, logprob }) => {
    const bar = el("span", { class: "tip-bar" });
    bar.style.setProperty("--share", `${100 * Math.exp(logprob)}%`);
    const kind = text === token.text ? "tip-row is-chosen" : "tip-row";
    return el("div", { class: kind }, el("code", {}, visible(text)), bar, el("span", { class: "number" }, percent(logprob)));
  });
  const head = el("div", { class: "tip-head" }, el("code", {}, visible(token.text)), el("strong", {}, percent(token.logprob)));
  return [head, ...rows];
}

/** Let `text`, an element whose spans name their tokens, show cards of `tokens`. */
export function attachCards(text, tokens) {
  let current = null;

  const show = (span) => {
    current?.classList.remove("is-current");
    current = span;
    if (!span) return hideTip();
    span.classList.add("is-current");
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    showTip(box.left + box.width / 2, box.top, ...rowsOf(tokens[Number(span.dataset.token)]));
  };

  const move = (step) => {
    const spans = text.getElementsByClassName("token");
    const at = current ? Array.prototype.indexOf.call(spans, current) + step : 0;
    const next = spans[Math.min(Math.max(at, 0), spans.length - 1)];
    next?.scrollIntoView({ block: "nearest" });
    show(next ?? null);
  };

  text.tabIndex = 0;
  text.addEventListener("pointerover", (event) => show(event.target.closest(".token")));
  text.addEventListener("pointerleave", () => show(null)); // a finger leaves at once: then the click shows the card
  text.addEventListener("click", (event) => show(event.target.closest(".token")));
  text.addEventListener("blur", () => show(null));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(step);
  });
}
