// Small helpers for the document. Text is only ever set as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** An element: `attributes` are set as such, functions become listeners; children are nodes or text. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function button(text, onClick, kind = "quiet") {
  return el("button", { type: "button", class: kind, click: onClick }, text);
}

let toastTimer = 0;

/** A short message at the edge of the window. */
export function toast(text) {
  const element = byId("toast");
  element.textContent = text;
  element.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (element.hidden = true), 2500);
}

/** Copy a text; where the browser does not allow that (plain HTTP from another host), show it to be copied by hand. */
export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    toast(`${what} copied`);
  } catch {
    byId("copy-title").textContent = what;
    const box = byId("copy-text");
    box.value = text;
    byId("copy").showModal();
    box.select();
  }
}

/** Show the card of details beside a point of the window; `rows` are nodes. */
export function showTip(x, y, ...rows) {
  const tip = byId("tip");
  tip.replaceChildren(...rows);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x - width / 2), window.innerWidth - width - 8);
  const above = y - height - 12;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : Math.min(y + 24, window.innerHeight - height - 8)}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const twoDigits = new Intl.NumberFormat("en-US", { minimumSignificantDigits: 2, maximumSignificantDigits: 2 });

/** A number for people: thousands separated, few decimals where it is small. */
export function shown(number) {
  if (!Number.isFinite(number)) return "–";
  return (number >= 100 || Number.isInteger(number) ? whole : twoDigits).format(number);
}
