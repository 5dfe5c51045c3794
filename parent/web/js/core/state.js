// What the server has told the page. `live.js` alone writes here; every component reads.

import { computed, signal } from "../lib.js";

/** The body of GET /api/pool; null until the first one came. */
export const pool = signal(null);

/** Unix milliseconds at which `pool` came: its waiting times are as of then. */
export const poolAt = signal(0);

/** Entries of GET /v1/models; null until they came. */
export const models = signal(null);

/** Job rows by id. */
export const jobs = signal(new Map());

/** Pool events, newest first. */
export const recent = signal([]);

/** Log lines by model: arrays of {n, model, text}; n counts up and is a line's key. */
export const logs = signal(new Map());

/** The server's version, from its hello. */
export const version = signal("");

/** Workers by model name. */
export const workers = computed(() => new Map((pool.value?.workers ?? []).map((worker) => [worker.model, worker])));

/** Model entries by name. */
export const modelsByName = computed(() => new Map((models.value ?? []).map((model) => [model.id, model])));

/** The state of one model: the pool's word where it has one, it is the fresher. */
export function stateOf(name) {
  return workers.value.get(name)?.state ?? modelsByName.value.get(name)?.state ?? "absent";
}

/** States in which a model has a process that serves or soon will. */
export const IS_UP = new Set(["starting", "loading", "ready"]);

/** How far a load is, 0 to 1; null where nothing is known yet. */
export function loadProgress(worker) {
  if (!worker || !worker.total_bytes) return null;
  return Math.min(1, worker.loaded_bytes / worker.total_bytes);
}
