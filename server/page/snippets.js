// A request as a command of curl and as a program for OpenAI's Python client. Keys are not in them: both read a variable.

const KEY = "MOE_SERVE_API_KEY";
// What OpenAI's client does not know by name goes into its extra_body.
const EXTRAS = ["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"];
const KNOWN = [
  "messages", "model", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "stop",
  "reasoning_effort", "tools", "tool_choice", "response_format", "logprobs", "top_logprobs", "stream", "stream_options",
  "n", "logit_bias", "parallel_tool_calls", "max_completion_tokens",
];

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** For a POSIX shell. */
export function asCurl(url, body, hasKey) {
  const lines = ["curl -sN", quoted(url), "-H 'Content-Type: application/json'"];
  if (hasKey) lines.push(`-H "Authorization: Bearer $${KEY}"`);
  lines.push(`-d ${quoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n  ").replace("curl -sN \\\n  ", "curl -sN ") + "\n";
}

/** A value as Python writes it. Strings of JSON are strings of Python, too. */
export function asLiteral(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const parts = Array.isArray(value)
    ? value.map((each) => asLiteral(each, inner))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${asLiteral(each, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const flat = `${open}${parts.join(", ")}${close}`;
  if (flat.length < 80 && !flat.includes("\n")) return flat;
  return `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}`;
}

/** For OpenAI's Python client; prints the answer as it comes. */
export function asPython(base, body, hasKey) {
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.includes(name) || EXTRAS.includes(name)));
  const known = Object.entries(body).filter(([name]) => !(name in extra));
  const arguments_ = known.map(([name, value]) => `    ${name}=${asLiteral(value, "    ")},\n`);
  if (Object.keys(extra).length) arguments_.push(`    extra_body=${asLiteral(extra, "    ")},\n`);
  return [
    `${hasKey ? "import os\n\n" : ""}from openai import OpenAI`,
    "",
    `client = OpenAI(base_url=${JSON.stringify(base)}, api_key=${hasKey ? `os.environ["${KEY}"]` : '"none"'})`,
    "stream = client.chat.completions.create(",
    `${arguments_.join("")})`,
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    "print()",
    "",
  ].join("\n");
}
