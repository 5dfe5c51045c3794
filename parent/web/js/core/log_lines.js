// Log lines as they come: numbered, bounded, and joined where a new connection repeats the last ones.

import { logs } from "./state.js";

// What a person scrolls back through; older lines are in the log file.
const KEPT_LINES = 5_000;
// Colour codes of a terminal, which a page would show as litter.
const ANSI = /\x1b\[[0-9;?]*[ -/]*[@-~]/g;

let counter = 0;

/** A line as it is to be read. */
export function bare(line) {
  return line.replace(ANSI, "");
}

/** Add lines of one model. repeated: they are the last ones the server has, some of them known here already. */
export function addLines(model, lines, repeated) {
  const texts = lines.map(bare);
  const known = logs.value.get(model) ?? [];
  const overlap = repeated ? overlapOf(known.map((line) => line.text), texts) : 0;
  const added = texts.slice(overlap).map((text) => ({ n: ++counter, model, text }));
  logs.value = new Map(logs.value).set(model, [...known, ...added].slice(-KEPT_LINES));
}

/** How many of the first `fresh` lines are the last of `known`: the longest such run. */
export function overlapOf(known, fresh) {
  for (let size = Math.min(known.length, fresh.length); size > 0; size--) {
    const tail = known.slice(-size);
    if (tail.every((line, i) => line === fresh[i])) return size;
  }
  return 0;
}

/** Forget the lines shown for a model (the file keeps them). */
export function clearLines(model) {
  const left = new Map(logs.value);
  if (model === "*") left.clear();
  else left.delete(model);
  logs.value = left;
}
