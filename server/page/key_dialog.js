// Asks for keys. They live in a variable of this page and nowhere else.
import { keys } from "./api.js";
import { byId } from "./dom.js";

const HINT = "This page keeps keys in memory only: they are gone when you close or reload it.";
let afterwards = null;

export function startKeys() {
  byId("open-keys").addEventListener("click", () => askForKeys());
  byId("cancel-keys").addEventListener("click", () => byId("keys").close());
  byId("keys-form").addEventListener("submit", () => {
    keys.client = byId("client-key").value.trim();
    keys.admin = byId("admin-key").value.trim();
    byId("open-keys").classList.toggle("is-set", Boolean(keys.client || keys.admin));
    document.dispatchEvent(new Event("keys-changed"));
    const next = afterwards;
    afterwards = null;
    next?.();
  });
  byId("keys").addEventListener("close", () => (afterwards = null));
}

/** Open the dialog; `reason` is what the service said, `then` runs once keys are given. */
export function askForKeys(reason = "", then = null) {
  byId("keys-reason").textContent = reason ? `The service says: ${reason}. ${HINT}` : HINT;
  byId("client-key").value = keys.client;
  byId("admin-key").value = keys.admin;
  afterwards = then;
  if (!byId("keys").open) byId("keys").showModal();
}
