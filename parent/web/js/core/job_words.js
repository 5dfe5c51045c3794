// What a job is called, wherever one is shown: from its row alone, whatever its kind.

import { computed } from "../lib.js";
import { jobs } from "./state.js";

const IS_UNDER_WAY = new Set(["queued", "running"]);

/** Whether it is still to end. */
export function isUnderWay(job) {
  return IS_UNDER_WAY.has(job.status);
}

/** What it works on: a model, a file, or what it makes. */
export function subject({ config = {} }) {
  const of = config.model ?? config.file ?? config.input ?? config.data ?? config.name;
  return typeof of === "string" ? of.split("/").filter(Boolean).slice(of.startsWith("/") ? -1 : 0).join("/") : "";
}

/** "quantize smollm2-135m" */
export function titleOf(job) {
  return [job.kind, subject(job)].filter(Boolean).join(" ");
}

/** Jobs that are being done, then those that wait, each in the order they were asked for. */
export const underWay = computed(() =>
  [...jobs.value.values()]
    .filter(isUnderWay)
    .sort((a, b) => (b.status === "running") - (a.status === "running") || a.created - b.created),
);

/** Jobs that have ended, the newest first. */
export const ended = computed(() =>
  [...jobs.value.values()].filter((job) => !isUnderWay(job)).sort((a, b) => (b.ended ?? b.created) - (a.ended ?? a.created)),
);
