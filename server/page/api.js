// The calls that the page makes. Paths are relative, so that the page also works below a proxy's prefix.
import { eventsOf } from "./sse.js";

export const PATHS = {
  chat: "v1/chat/completions",
  health: "health",
  experts: "expert_load",
};

/** In memory only. */
export const keys = { client: "", admin: "" };

/** A refusal of the service, in its own words, or no answer at all (`status` 0). */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfterS });
  }
}

const NO_ANSWER = "The service does not answer. It may have stopped or be restarting.";
const STATE_WITHIN_MS = 5000; // for answers about the service's state, which a service that works gives at once

async function ask(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  try {
    return await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(NO_ANSWER);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** The ApiError that an `error` in JSON says: an object of this service, or only text, as some proxies write it. */
function errorOf(error, otherwise, details) {
  const { message, code, param } = typeof error === "string" ? { message: error } : (error ?? {});
  return new ApiError(typeof message === "string" && message ? message : otherwise, { code, param, ...details });
}

function refusal(response, text) {
  const wait = Number(response.headers.get("Retry-After")) || null;
  const otherwise = text.slice(0, 300) || response.statusText || "no reason was given";
  return errorOf(parsed(text)?.error, otherwise, { status: response.status, retryAfterS: wait });
}

/** The JSON that says how the service is; it must have a list `name`, whatever its status. */
async function stateOf(path, key, name) {
  const response = await ask(path, key, { signal: AbortSignal.timeout(STATE_WITHIN_MS) });
  const text = await response.text().catch(() => "");
  const body = parsed(text);
  if (Array.isArray(body?.[name])) return body;
  if (!response.ok) throw refusal(response, text);
  throw new ApiError(`What answers at /${path} is not this service, or its answer broke off.`, { status: response.status });
}

/** Readiness; its body is the same in a 503. */
export const health = () => stateOf(PATHS.health, "", "models");

/** Tokens by layer and expert. */
export const expertLoad = () => stateOf(PATHS.experts, keys.admin || keys.client, "layers");

/** The chunks of a streamed answer. Ends well only after the stream's own end marker. */
export async function* streamChat(body, signal) {
  const response = await ask(PATHS.chat, keys.client || keys.admin, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw refusal(response, await response.text().catch(() => ""));
  try {
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw errorOf(chunk.error, "The service gave no reason.", { status: response.status });
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
  throw new ApiError("The connection ended before the answer was complete.");
}
