// Server-sent events from a stream of bytes, wherever the network cuts it.

/** Takes pieces of text and returns the data of the events that they complete. */
export class EventParser {
  #line = ""; // begun, without its end
  #data = []; // lines of the event that has begun
  #endsInReturn = false; // the last piece ended in \r, so a \n at the head of the next belongs to it

  push(text) {
    if (this.#endsInReturn && text.startsWith("\n")) text = text.slice(1);
    this.#endsInReturn = text === "" ? this.#endsInReturn : text.endsWith("\r");
    const lines = text.split(/\r\n|\n|\r/);
    lines[0] = this.#line + lines[0];
    this.#line = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "" && this.#data.length) {
        events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.startsWith("data: ") ? line.slice(6) : line.slice(5));
      }
    }
    return events;
  }
}

/** The data of every event of a response's body. */
export async function* eventsOf(body) {
  const parser = new EventParser();
  const decoder = new TextDecoder(); // keeps the bytes of a character that the network has cut
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
