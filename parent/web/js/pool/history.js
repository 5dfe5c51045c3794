// The last minutes of the pool's throughput, gathered from pool events as long as the page is open.

import { effect, signal } from "../lib.js";
import { pool } from "../core/state.js";

export const WINDOW_S = 180;

/** [seconds, tokens per second], one point a second at most; oldest first. */
export const points = signal([[], []]);

/** Tokens per second of all workers together, now. */
export function total(view) {
  return (view?.workers ?? []).reduce((sum, worker) => sum + (worker.active > 0 ? (worker.tokens_per_s ?? 0) : 0), 0);
}

effect(() => {
  const view = pool.value;
  if (view === null) return;
  const second = Math.floor(Date.now() / 1000);
  const [times, rates] = points.peek();
  const from = times.findIndex((time) => time > second - WINDOW_S);
  const same = times.at(-1) === second;
  const end = same ? times.length - 1 : times.length;
  const start = from < 0 ? times.length : from;
  points.value = [
    [...times.slice(start, end), second],
    [...rates.slice(start, end), total(view)],
  ];
});
