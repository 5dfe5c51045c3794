// One answer on its way: asks, reads the stream, and puts what came into the conversation.
//
// A run belongs to its conversation, not to the page: it goes on while the user looks elsewhere. It owns the
// signals of its progress; the conversation gets the message once, at the end, whatever the end is. What has
// arrived is drawn at most so often, because a fast model sends more events than a screen shows frames.

import { signal } from "../lib.js";
import { request } from "../core/api.js";
import { readEvents } from "../core/sse.js";
import { conversation, newId, update } from "./conversations.js";
import { splitThinking } from "./thinking.js";

const DRAW_EVERY_MS = 80;
// Below this an answer came in one piece, and its rate would be the network's.
const SHORTEST_TIMED_S = 0.05;

/** Runs under way, by conversation. */
export const runs = signal(new Map());

/** Text for a screen reader when an answer ends. */
export const announcement = signal("");

/** Ask the conversation's model for the next answer. One at a time for each conversation. */
export function startRun(id) {
  if (runs.value.has(id)) return;
  const run = new Run(conversation(id).value);
  runs.value = new Map(runs.value).set(id, run);
  run.go().finally(() => {
    const left = new Map(runs.value);
    left.delete(id);
    runs.value = left;
    announcement.value = run.lastWords();
  });
}

class Run {
  constructor({ id, model, messages, settings }) {
    this.id = id;
    this.model = model;
    this.body = bodyOf(model, messages, settings);
    /** What is drawn: {reasoning, answer}. */
    this.shown = signal({ reasoning: "", answer: "" });
    this.startedAt = performance.now();
    this.firstAt = 0;
    this.lastAt = 0;
    this.content = "";
    this.reasoning = "";
    this.usage = null;
    this.finish = null;
    this.failure = null;
    this.stopped = false;
    this.abort = new AbortController();
    this.drawTimer = 0;
  }

  /** The user has read enough. What came is kept. */
  stop() {
    this.stopped = true;
    this.abort.abort();
  }

  async go() {
    try {
      const response = await request("v1/chat/completions", { method: "POST", body: this.body, signal: this.abort.signal });
      for await (const event of readEvents(response)) {
        if (event === null) continue;
        if (event.data === "[DONE]") break;
        this.take(JSON.parse(event.data));
      }
      if (!this.finish && !this.failure) this.failure = "The answer ended before it was complete.";
    } catch (err) {
      if (!this.stopped) this.failure = err instanceof TypeError ? "The connection broke." : err.message;
    }
    clearTimeout(this.drawTimer);
    this.settle();
  }

  take(chunk) {
    if (chunk.error) {
      this.failure = chunk.error.message;
      return;
    }
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const { content, reasoning_content: reasoning } = choice.delta ?? {};
    if (!content && !reasoning) return;
    this.lastAt = performance.now();
    if (!this.firstAt) this.firstAt = this.lastAt;
    this.content += content ?? "";
    this.reasoning += reasoning ?? "";
    // A timer, not a frame: frames stop in a hidden tab, and the answer should not.
    this.drawTimer ||= setTimeout(() => {
      this.drawTimer = 0;
      this.shown.value = this.split();
    }, DRAW_EVERY_MS);
  }

  split() {
    if (this.reasoning) return { reasoning: this.reasoning, answer: this.content };
    return splitThinking(this.content);
  }

  settle() {
    const { reasoning, answer } = this.split();
    const message = {
      id: newId(),
      role: "assistant",
      content: answer,
      reasoning,
      model: this.model,
      figures: this.figures(),
      error: this.failure,
      stopped: this.stopped,
      cut: this.finish === "length",
    };
    const now = conversation(this.id).value;
    // Deleted while it was answered: then there is nothing to keep it in.
    if (now !== null) update(this.id, { messages: [...now.messages, message] });
  }

  /** tokens/s counts from the first token to the last one, so the prompt's time is not in it. */
  figures() {
    if (!this.firstAt) return null;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const tokens = this.usage?.completion_tokens ?? null;
    const timed = tokens > 1 && seconds >= SHORTEST_TIMED_S;
    return {
      first_s: (this.firstAt - this.startedAt) / 1000,
      tokens,
      tokens_per_s: timed ? (tokens - 1) / seconds : null,
      prompt_tokens: this.usage?.prompt_tokens ?? null,
      cached_tokens: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
    };
  }

  lastWords() {
    if (this.failure) return `The answer failed: ${this.failure}`;
    return this.stopped ? "Stopped." : "The answer is complete.";
  }
}

function bodyOf(model, messages, settings) {
  const said = messages
    .filter((message) => message.role === "user" || message.content)
    .map(({ role, content }) => ({ role, content }));
  const system = settings.system?.trim();
  const body = {
    model,
    messages: system ? [{ role: "system", content: system }, ...said] : said,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (settings.temperature !== undefined) body.temperature = settings.temperature;
  if (settings.max_tokens !== undefined) body.max_tokens = settings.max_tokens;
  return body;
}
