// The kinds of job there are, GET /api/jobs/kinds, and what their fields can name.

import { signal } from "../lib.js";
import { call } from "../core/api.js";
import { jobs, modelsByName } from "../core/state.js";

/** [{name, summary, positional, gpu, schema}]; null until they came. */
export const kinds = signal(null);

/** Why they could not be read; empty where they could. */
export const kindsFault = signal("");

/** Read them now. */
export async function readKinds() {
  try {
    kinds.value = (await call("GET", "api/jobs/kinds")).kinds;
    kindsFault.value = "";
  } catch (err) {
    kindsFault.value = err.message;
  }
}

/** Names that a field of an adapter or a dataset can hold; a person may type another. model: whose adapters. */
export async function offers(source, model) {
  if (source === "adapter") return adapters(model);
  if (source === "dataset") return datasets();
  return [];
}

async function adapters(model) {
  // What is half typed is no model yet.
  if (!modelsByName.value.has(model)) return [];
  try {
    const { data } = await call("GET", `v1/adapters/available?model=${encodeURIComponent(model)}`);
    return data.filter((one) => one.fits !== false).map((one) => one.id);
  } catch {
    // They can still be typed.
    return [];
  }
}

/** Datasets that jobs have made. */
function datasets() {
  return [...new Set([...jobs.value.values()].map((job) => (job.kind === "dataset" ? job.result?.dataset : null)).filter(Boolean))];
}
