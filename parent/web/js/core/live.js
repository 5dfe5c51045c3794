// The one connection that keeps the page current: GET /api/events, read with fetch, opened again when it breaks.
//
// Owns the signals of state.js and the state of the connection. Nothing here polls. A hidden tab lets go of its
// connection, because a browser opens six to one server and a person more tabs than that; it is back at once
// when the tab is looked at. Which logs are wanted is part of the request, so a change of that reopens the
// stream; the server says everything anew on connect, and what was there is replaced by it.

import { batch, effect, signal, untracked } from "../lib.js";
import { apiKey, needsKey } from "./api.js";
import { addLines } from "./log_lines.js";
import { listenTo } from "./sse.js";
import * as state from "./state.js";

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 10_000;
// A glance at another tab should not cost a reconnect.
const HIDDEN_GRACE_MS = 10_000;
const RECENT_EVENTS = 100;

/** {state: "connecting" | "open" | "lost" | "paused", retryAt: unix ms of the next try, reason} */
export const connection = signal({ state: "connecting", retryAt: 0, reason: "" });

/** Whose logs to send: a model's name, "*" for all, null for none. */
export const logsWanted = signal(null);

/** The server was replaced by another version while this page was open. */
export const outdated = signal(false);

let current = null;
let wake = () => {};

/** Connect, and stay connected. Call once. */
export function start() {
  effect(() => {
    logsWanted.value;
    apiKey.value;
    if (!needsKey.value) untracked(reopen);
    else untracked(close);
  });
  let grace = 0;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(grace);
    if (document.hidden) grace = setTimeout(pause, HIDDEN_GRACE_MS);
    else if (connection.value.state === "paused") reopen();
  });
}

/** Try now instead of at the end of the wait. */
export function retryNow() {
  wake();
}

function pause() {
  close();
  connection.value = { state: "paused", retryAt: 0, reason: "" };
}

function close() {
  current?.abort();
  current = null;
  wake();
}

function reopen() {
  close();
  current = new AbortController();
  keepOpen(current.signal);
}

async function keepOpen(abort) {
  let delay = FIRST_RETRY_MS;
  while (!abort.aborted) {
    let reason = "the connection ended";
    try {
      await listen(abort, () => {
        delay = FIRST_RETRY_MS;
      });
    } catch (err) {
      reason = err.message;
    }
    if (abort.aborted || needsKey.value) return;
    const wait = delay * (0.8 + 0.4 * Math.random());
    connection.value = { state: "lost", retryAt: Date.now() + wait, reason };
    await sleep(wait);
    delay = Math.min(delay * 2, LAST_RETRY_MS);
  }
}

function sleep(ms) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

/** One connection, until it ends. Rejects with why. opened: called when the server has said hello. */
async function listen(abort, opened) {
  const name = untracked(() => logsWanted.value);
  const fresh = new Set();
  for await (const event of listenTo(`api/events${name ? `?logs=${encodeURIComponent(name)}` : ""}`, abort)) {
    if (event === null) continue;
    if (event.event === "hello") opened();
    take(event.event, JSON.parse(event.data), fresh);
  }
}

/** Put one event into the state. fresh: names whose first lines of this connection have come. */
function take(kind, body, fresh) {
  batch(() => {
    switch (kind) {
      case "hello":
        if (state.version.value && state.version.value !== body.version) outdated.value = true;
        else state.version.value = body.version;
        state.jobs.value = new Map();
        connection.value = { state: "open", retryAt: 0, reason: "" };
        break;
      case "pool":
        takePool(body);
        break;
      case "models":
        state.models.value = body;
        break;
      case "job":
        state.jobs.value = new Map(state.jobs.value).set(body.id, body);
        break;
      case "event":
        remember([body]);
        break;
      case "log":
        addLines(body.model, body.lines, !fresh.has(body.model));
        fresh.add(body.model);
        break;
    }
  });
}

// Figures that move all the time are shown once a second: nobody reads them faster, and each change is a frame.
const CALM_MS = 1_000;
let shownShape = "";
let shownAt = 0;
let held = null;
let heldTimer = 0;

/** Show a pool: at once when something happened in it, else when the figures before it have been read. */
function takePool(body) {
  const shape = shapeOf(body);
  const wait = shape === shownShape ? shownAt + CALM_MS - performance.now() : 0;
  held = body;
  if (wait > 0) {
    heldTimer ||= setTimeout(showPool, wait);
    return;
  }
  shownShape = shape;
  showPool();
}

function showPool() {
  clearTimeout(heldTimer);
  heldTimer = 0;
  shownAt = performance.now();
  batch(() => {
    state.pool.value = { ...held, workers: held.workers.map(asSeen) };
    state.poolAt.value = Date.now();
    if (held.recent) remember(held.recent);
  });
}

/** What of a pool a person notices at once; the rest are figures. */
function shapeOf({ workers, queue, leases, recent, budget_bytes, reserved_bytes, cache }) {
  const seen = workers.map((w) => [w.model, w.state, w.active > 0, w.queued > 0, w.pinned, w.unloading, w.loaded_bytes, w.reason]);
  return JSON.stringify([seen, queue.map((ticket) => [ticket.model, ticket.waits_for]), leases, recent?.at(-1)?.time, budget_bytes, reserved_bytes, cache?.off]);
}

/** A model that was told to go and still answers is, for a person, finishing. */
function asSeen(worker) {
  return worker.unloading && worker.state === "ready" ? { ...worker, state: "draining" } : worker;
}

function remember(events) {
  const known = new Set(state.recent.value.map(eventKey));
  const added = events.filter((event) => !known.has(eventKey(event)));
  if (!added.length) return;
  const all = [...added, ...state.recent.value].sort((a, b) => b.time - a.time);
  state.recent.value = all.slice(0, RECENT_EVENTS);
}

/** Events have no id; time, kind and model tell them apart. */
export function eventKey(event) {
  return `${event.time} ${event.event} ${event.model}`;
}
