// Asks the service how it does, once a second while somebody looks, and remembers the last minutes.
import { ApiError, expertLoad, health } from "./api.js";

const EVERY_MS = 1000;
const KEPT = 300; // samples
const FRESH = 0.35; // weight of the newest counts among the recent ones

/** What is known: `health` (null before the first answer), `error`, `samples`, `experts`, `expertsError`. */
export const known = { health: null, error: null, samples: [], experts: null, expertsError: null };

let process = null; // what tells one process of the service from another
let lastStats = null;
let lastMs = 0;
let refusedWith = null; // until the keys change

/** `wantsExperts` says whether anybody sees their load. */
export function startWatch(onNews, wantsExperts) {
  document.addEventListener("keys-changed", () => (refusedWith = null));
  const turn = async () => {
    try {
      if (document.hidden) return;
      await look(wantsExperts());
      onNews(known);
    } finally {
      setTimeout(turn, EVERY_MS); // whatever has gone wrong: the next answer may be in order
    }
  };
  turn();
}

async function look(withExperts) {
  try {
    known.health = await health();
    known.error = null;
    noteProcess(known.health.engine?.load_seconds);
    remember(known.health.stats);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    known.error = error;
    lastStats = refusedWith = null; // another service may come
    return;
  }
  if (refusedWith || !withExperts) return;
  try {
    takeLoad((await expertLoad()).layers);
    known.expertsError = null;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    known.expertsError = error;
    if (error.status === 401 || error.status === 403) refusedWith = error;
  }
}

/** Counts and rates belong to one process: another may count further, and then differences mean nothing. */
function noteProcess(loadSeconds) {
  if (loadSeconds === undefined || loadSeconds === process) return;
  process = loadSeconds;
  lastStats = known.experts = null;
  known.samples = [];
}

function remember(stats) {
  const now = performance.now();
  if (stats && lastStats && stats.num_steps >= lastStats.num_steps) {
    const seconds = (now - lastMs) / 1000;
    const rate = (name) => (stats[name] - lastStats[name]) / seconds;
    known.samples.push({
      generated: rate("num_generated_tokens"),
      prompt: rate("num_prompt_tokens"),
      requests: stats.num_running + stats.num_waiting,
      kv: stats.num_pages_total ? stats.num_pages_used / stats.num_pages_total : 0,
    });
    if (known.samples.length > KEPT) known.samples.shift();
  }
  lastStats = stats;
  lastMs = now;
}

/** Keep each layer's counts since the start, and recent ones, in which older tokens fade as new ones come. */
function takeLoad(layers) {
  const before = known.experts;
  const wasEmpty = before?.length === 0; // then all of these counts are recent
  const isSame = before?.length === layers.length && layers.every((layer, index) => isLater(layer, before[index]));
  known.experts = layers.map(({ layer, tokens }, index) => {
    if (!isSame) return { layer, all: tokens, recent: wasEmpty ? tokens : tokens.map(() => 0) };
    const { all, recent } = before[index];
    const added = tokens.map((count, expert) => count - all[expert]);
    const isIdle = added.every((count) => count === 0);
    const mixed = isIdle ? recent : recent.map((count, expert) => count * (1 - FRESH) + added[expert] * FRESH);
    return { layer, all: tokens, recent: mixed };
  });
}

function isLater(layer, before) {
  const { tokens } = layer;
  if (layer.layer !== before.layer || tokens.length !== before.all.length) return false;
  return tokens.every((count, expert) => count >= before.all[expert]);
}
