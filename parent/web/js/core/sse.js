// Server-sent events out of a fetch: EventSource can send no Authorization header.

import { request } from "./api.js";

// The server says something on every stream at least every 15 s; after this long a connection is taken for dead.
const SILENCE_MS = 40_000;

/** The events of a stream of this server, as `readEvents` has them, until it ends. Rejects with why it broke. */
export async function* listenTo(path, abort) {
  const stop = new AbortController();
  const onAbort = () => stop.abort();
  abort.addEventListener("abort", onAbort);
  let silence = 0;
  const alive = () => {
    clearTimeout(silence);
    silence = setTimeout(() => stop.abort(), SILENCE_MS);
  };
  alive();
  try {
    const response = await request(path, { signal: stop.signal });
    for await (const event of readEvents(response)) {
      if (abort.aborted) return;
      alive();
      yield event;
    }
  } catch (err) {
    if (err.name === "AbortError") throw new Error("the server went silent");
    throw err;
  } finally {
    clearTimeout(silence);
    abort.removeEventListener("abort", onAbort);
    // Whoever stops listening in the middle lets the connection go.
    stop.abort();
  }
}

/** Yields {event, data}, and id where it has one, for each event of the stream; null for each comment. */
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
  #id = {};
  #data = [];

  /** The events and comments that this piece completes. */
  push(text) {
    const out = [];
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) out.push({ event: this.#event || "message", data: this.#data.join("\n"), ...this.#id });
        this.#event = "";
        this.#id = {};
        this.#data = [];
      } else if (line.startsWith(":")) {
        out.push(null);
      } else {
        const colon = line.indexOf(":");
        const field = colon < 0 ? line : line.slice(0, colon);
        const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (field === "event") this.#event = value;
        else if (field === "id") this.#id = { id: value };
        else if (field === "data") this.#data.push(value);
      }
    }
    return out;
  }
}
