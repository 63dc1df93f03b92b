// Which token wrote which part of the text. Tokens come as log-probabilities beside the text, in the same order, but
// not always in the same event; a character may need several tokens.

const strict = new TextDecoder("utf-8", { fatal: true });

/** Text of bytes, or null if they end within a character. */
function textOf(bytes) {
  try {
    return strict.decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

/** Cuts text at its tokens. `tokens` holds what is known of each; a piece names its token by number, or null. */
export class TokenAligner {
  tokens = [];
  #text = ""; // not given out yet
  #waiting = []; // numbers of tokens whose text has not come yet
  #bytes = []; // of tokens that end within a character
  #first = null; // the first of these

  push(text, entries) {
    this.#text += text;
    for (const entry of entries) this.#take(entry);
    const pieces = [];
    while (this.#waiting.length && this.#text) {
      const number = this.#waiting[0];
      const expected = this.tokens[number].text;
      if (!this.#text.startsWith(expected)) {
        if (expected.startsWith(this.#text)) return pieces; // the rest of it is on its way
        this.#waiting = []; // the service changed the text: show what it says
        break;
      }
      this.#waiting.shift();
      this.#text = this.#text.slice(expected.length);
      if (expected) pieces.push({ text: expected, token: number });
    }
    if (this.#text && !this.#waiting.length) pieces.push({ text: this.#text, token: null });
    if (!this.#waiting.length) this.#text = "";
    return pieces;
  }

  /** What was held back, once nothing more comes. */
  end() {
    const rest = this.#text;
    this.#text = "";
    return rest ? [{ text: rest, token: null }] : [];
  }

  #take(entry) {
    this.#first ??= entry;
    this.#bytes.push(...(entry.bytes ?? new TextEncoder().encode(entry.token)));
    const text = textOf(this.#bytes);
    if (text === null && this.#bytes.length < 8) return;
    const { logprob, top_logprobs: top } = this.#first;
    this.tokens.push({ text: text ?? this.#first.token, logprob, top: top ?? [] });
    this.#waiting.push(this.tokens.length - 1);
    this.#bytes = [];
    this.#first = null;
  }
}
