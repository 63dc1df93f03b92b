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

async function ask(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  try {
    return await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(NO_ANSWER);
  }
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  const wait = Number(response.headers.get("Retry-After")) || null;
  try {
    const { message, code, param } = JSON.parse(text).error;
    return new ApiError(message, { status: response.status, code, param, retryAfterS: wait });
  } catch {
    const message = text.slice(0, 300) || response.statusText || "no reason was given";
    return new ApiError(message, { status: response.status, retryAfterS: wait });
  }
}

/** Readiness; its body is the same in a 503. */
export async function health() {
  const response = await ask(PATHS.health, "");
  if (response.status !== 200 && response.status !== 503) throw await refusal(response);
  return await response.json().catch(() => {
    throw new ApiError("what answers at /health is not this service", { status: response.status });
  });
}

/** Tokens by layer and expert. */
export async function expertLoad() {
  const response = await ask(PATHS.experts, keys.admin || keys.client);
  if (!response.ok) throw await refusal(response);
  return await response.json();
}

/** The chunks of a streamed answer. Ends well only after the stream's own end marker. */
export async function* streamChat(body, signal) {
  const response = await ask(PATHS.chat, keys.client || keys.admin, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  try {
    for await (const data of eventsOf(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, { ...chunk.error, status: response.status });
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
  throw new ApiError("The connection ended before the answer was complete.");
}
