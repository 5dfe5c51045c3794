// What a person can tell the pool to do. Each answers at once; what follows comes as events.

import { ApiFailure, call, modelPath } from "./api.js";
import { plural } from "./format.js";
import { attempt, say } from "./toasts.js";

/** Load a model now. */
export function load(name) {
  return attempt(() => call("POST", modelPath(name, "load")));
}

/** Unload a model after its running answers; force: now, with an error to them. */
export function unload(name, force = false) {
  return attempt(() => call("POST", modelPath(name, "unload"), { force }));
}

/** Protect a model from eviction, or no longer. */
export async function pin(name, pinned) {
  const done = await attempt(() => call("POST", modelPath(name, pinned ? "pin" : "unpin")));
  if (done) say(pinned ? `${name} is pinned: it is never evicted` : `${name} may be evicted again`);
}

/** Replace one model by another: the old one's running answers end first, in full. */
export async function switchModel(from, to) {
  if (await unload(from)) {
    if (await load(to)) say(`Switching from ${from} to ${to}`);
  }
}

/** Have every worker write what is kept of prompts and is not on disk yet; says what came of it. */
export function flushPrompts() {
  return attempt(async () => {
    const report = await call("POST", "api/cache/flush", undefined, [503]);
    if (report.error) throw new ApiFailure(503, report.error.code, report.error.message);
    if (report.durable) say(`All prompts are on disk: ${plural(report.flushed, "record")} written`);
    else throw new ApiFailure(503, "not_durable", `Not all prompts are on disk: ${report.missing ? `${plural(report.missing, "record")} missing` : "a worker does not answer"}`);
  });
}

/** Put a text into the clipboard. said: what to tell then. */
export async function copyText(text, said = "Copied") {
  const copied = await attempt(() => {
    if (!navigator.clipboard) throw new Error("A browser lets a page copy only where its address is https or this machine's own.");
    return navigator.clipboard.writeText(text);
  });
  if (copied) say(said);
}
