// Puts the page together: views, colours, keys, and the state of the service in the head.
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { startKeys } from "./key_dialog.js";
import { startPanel } from "./panel.js";
import { buildForm } from "./request.js";
import { showServer, startServerView } from "./server_view.js";
import { known, startWatch } from "./watch.js";

const VIEWS = ["chat", "server"];
const THEMES = ["auto", "light", "dark"];

function showView(name) {
  for (const each of VIEWS) {
    const tab = byId(`tab-${each}`);
    tab.setAttribute("aria-selected", String(each === name));
    tab.tabIndex = each === name ? 0 : -1;
    byId(each).hidden = each !== name;
  }
  refresh();
}

function startTabs() {
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => showView(name));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = VIEWS.find((each) => each !== name);
      showView(other);
      byId(`tab-${other}`).focus();
    });
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme[0].toUpperCase() + theme.slice(1);
  refresh();
}

function startTheme() {
  byId("theme").addEventListener("click", () => {
    const now = THEMES.indexOf(document.documentElement.dataset.theme);
    setTheme(THEMES[(now + 1) % THEMES.length]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
}

/** State and words of the head. */
function stateOf({ health, error }) {
  if (error) return ["down", "No answer"];
  if (!health) return ["unknown", "Connecting"];
  if (health.status === "ready") return ["ready", health.models[0]];
  if (health.phase) return ["loading", `Loading${health.total ? ` ${health.done} of ${health.total}` : ""}`];
  return ["down", health.reason ?? "Not ready"];
}

function refresh() {
  const [state, text] = stateOf(known);
  byId("status").dataset.state = state;
  if (byId("status-text").textContent !== text) byId("status-text").textContent = text;
  if (known.health?.models[0]) byId("welcome-model")?.replaceChildren(known.health.models[0]);
  showServer(known, byId("span").value);
}

buildForm(byId("settings"));
startServerView();
startTabs();
startTheme();
startPanel(refresh);
startKeys();
startChat();
byId("span").addEventListener("change", refresh);
startWatch(refresh, () => !byId("server").hidden || byId("panel").checkVisibility({ visibilityProperty: true }));
byId("prompt").focus();
