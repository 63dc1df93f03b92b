// The view of the service: what it serves and how, what it does now, and how evenly it uses its experts.
import { Chart } from "./chart.js";
import { button, byId, el, shown } from "./dom.js";
import { HeatMap, ratioOf } from "./heat_map.js";
import { askForKeys } from "./key_dialog.js";

const CARDS = [
  ["generated", "Generated tokens/s", {}],
  ["prompt", "Prompt tokens/s", {}],
  ["requests", "Requests", {}],
  ["kv", "KV cache in use", { most: 1 }],
];

let cards = {};
let map = null;
let liveMap = null;

export function startServerView() {
  for (const [name, title, options] of CARDS) {
    const value = el("div", { class: "card-value", id: `card-${name}` }, "–");
    const more = el("div", { class: "card-more" });
    const canvas = el("canvas", { class: "spark", "aria-hidden": "true" });
    byId("cards").append(el("section", { class: "card" }, el("h2", {}, title), value, more, canvas));
    cards[name] = { value, more, chart: new Chart(canvas, options) };
  }
  map = new HeatMap(byId("map"));
  liveMap = new HeatMap(byId("live-map"), { isSmall: true });
}

/** Draw what is known (see `watch.js`); `span` is "recent" or "all". */
export function showServer(known, span) {
  const { health, samples } = known;
  if (!health) return;
  showHead(health);
  showCards(health, samples, known.error);
  showExperts(known, span);
  showLayers(health, known.experts);
}

function showHead({ models, engine, status, reason, phase, done, total, elapsed_s: elapsed }) {
  byId("server-model").textContent = models[0] ?? "Server";
  const facts = [];
  if (engine) {
    facts.push(engine.device, engine.dtype, `context of ${shown(engine.max_model_len)} tokens`);
    facts.push(`${shown(engine.num_kv_tokens)} tokens fit into the KV cache`, `loaded in ${shown(engine.load_seconds)} s`);
  } else if (phase) {
    facts.push(`Loading: ${phase}${total ? ` ${done} of ${total}` : ""}`, `${shown(elapsed)} s so far`);
  }
  if (models.length > 1) facts.push(`also called ${models.slice(1).join(", ")}`);
  if (status !== "ready" && reason) facts.unshift(reason);
  byId("server-facts").replaceChildren(...facts.map((fact) => el("span", {}, fact)));
}

function showCards({ stats, engine }, samples, error) {
  const now = error ? null : stats; // what was so at the last answer may be over
  const last = now && samples.at(-1);
  const peak = (name) => {
    const most = Math.max(0, ...samples.map((sample) => sample[name]));
    return most ? `peak ${shown(most)}, ` : "";
  };
  const texts = {
    generated: [
      last ? shown(last.generated) : "–",
      stats ? `${peak("generated")}${shown(stats.num_generated_tokens)} since the start` : "",
    ],
    prompt: [
      last ? shown(last.prompt) : "–",
      stats ? `${peak("prompt")}${shown(stats.num_cached_tokens)} from the prefix cache` : "",
    ],
    requests: [
      now ? `${shown(now.num_running)} running` : "–",
      now ? `${shown(now.num_waiting)} waiting, ${shown(engine?.max_requests)} at most` : "",
    ],
    kv: [
      now?.num_pages_total ? `${((100 * now.num_pages_used) / now.num_pages_total).toFixed(1)} %` : "–",
      now ? `${shown(now.num_pages_used)} of ${shown(now.num_pages_total)} pages` : "",
    ],
  };
  for (const [name, [value, more]] of Object.entries(texts)) {
    cards[name].value.textContent = value;
    cards[name].more.textContent = more;
    cards[name].chart.show(samples.map((sample) => sample[name]));
  }
}

/** Why there is no map, as nodes; null if there is one. */
function whyNoMap({ experts, expertsError, health }) {
  if (expertsError?.status === 401 || expertsError?.status === 403) {
    const say = `The service says: ${expertsError.message}.`;
    return [el("p", {}, say), button("Enter the admin key", () => askForKeys(expertsError.message), "primary")];
  }
  if (expertsError) return [el("p", {}, expertsError.message)];
  if (!experts) return [el("p", {}, "Asking for the counters.")];
  if (experts.length) return null;
  const flag = el("code", {}, "--expert-load");
  const isUsed = health.stats?.num_generated_tokens > 0 && health.stats.num_running === 0;
  if (isUsed) return [el("p", {}, "The service does not count tokens by expert. Start it with ", flag, " to see them here.")];
  const say = "Nothing is counted yet. The map comes with the first answer, if the service was started with ";
  return [el("p", {}, say, flag, ".")];
}

function showExperts(known, span) {
  const reason = whyNoMap(known);
  byId("experts-note").hidden = !reason;
  for (const id of ["map", "legend", "span-label", "map-caption"]) byId(id).hidden = Boolean(reason);
  byId("live").hidden = Boolean(reason);
  const note = byId("experts-note");
  if (reason) {
    const text = reason.map((node) => node.textContent).join("");
    if (note.textContent !== text) note.replaceChildren(...reason); // a button that is focused stays
    return;
  }
  const rows = (name) => known.experts.map((layer) => ({ layer: layer.layer, counts: layer[name] }));
  map.show(rows(span));
  liveMap.show(rows("recent"));
}

function showLayers({ engine }, experts) {
  const body = byId("layers");
  const paths = (engine?.moe_paths ?? []).map((line) => /^layer (\d+): (.*)$/.exec(line)).filter(Boolean);
  const checks = new Map((engine?.selfcheck ?? []).map((check) => [check.layer, check]));
  const loads = new Map((experts ?? []).map((layer) => [layer.layer, layer]));
  const rows = paths.map(([, number, path]) => {
    const layer = Number(number);
    return [number, path, errorText(checks.get(layer)), loadText(loads.get(layer))];
  });
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((texts, index) => {
    const row = body.rows[index] ?? body.insertRow();
    while (row.cells.length < texts.length) row.insertCell();
    texts.forEach((text, column) => {
      if (row.cells[column].textContent !== text) row.cells[column].textContent = text;
    });
  });
  const isPart = checks.size < paths.length;
  byId("layers-note").textContent = !engine
    ? "The layers are known once the model is loaded."
    : isPart
      ? `${checks.size} of ${paths.length} layers were compared with plain torch at the start; --selfcheck all compares each.`
      : "Every layer was compared with plain torch at the start.";
}

function errorText(check) {
  return check ? `${check.worst_error.toExponential(1)} of ${check.tolerance.toExponential(0)} allowed` : "not compared";
}

function loadText(layer) {
  if (!layer || !layer.all.some(Boolean)) return "–";
  return `${layer.all.indexOf(Math.max(...layer.all))}, ${ratioOf(layer.all).toFixed(2)} × mean`;
}
