// Server-sent events out of a fetch: EventSource can send no Authorization header.

/** Yields {event, data} for each event of the stream, and null for each comment (a sign of life). */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventParser();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The line rules of the event-stream format, over text that comes in any pieces. */
export class EventParser {
  #rest = "";
  #event = "";
  #data = [];

  /** The events and comments that this piece completes. */
  push(text) {
    const out = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) out.push({ event: this.#event || "message", data: this.#data.join("\n") });
        this.#event = "";
        this.#data = [];
      } else if (line.startsWith(":")) {
        out.push(null);
      } else {
        const colon = line.indexOf(":");
        const field = colon < 0 ? line : line.slice(0, colon);
        const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (field === "event") this.#event = value;
        else if (field === "data") this.#data.push(value);
      }
    }
    return out;
  }
}
