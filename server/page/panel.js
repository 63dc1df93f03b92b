// The panel of the request's settings. It lies beside the conversation in wide windows, and over it in narrow ones.
import { byId } from "./dom.js";

let changed = () => {};

/** `onChange` runs whenever the panel opens or closes. */
export function startPanel(onChange) {
  changed = onChange;
  byId("open-panel").addEventListener("click", () => setPanel(!isOpen()));
  byId("close-panel").addEventListener("click", close);
  byId("panel").addEventListener("keydown", (event) => {
    const liesOver = isOpen() && byId("close-panel").checkVisibility();
    if (event.key !== "Escape" || event.isComposing || !liesOver) return;
    event.preventDefault(); // this Esc is for the panel, and not for the answer that is being written
    close();
  });
}

export function setPanel(opens) {
  document.body.classList.toggle("panel-open", opens);
  byId("open-panel").setAttribute("aria-expanded", String(opens));
  changed();
}

const isOpen = () => document.body.classList.contains("panel-open");

function close() {
  setPanel(false);
  byId("open-panel").focus();
}
