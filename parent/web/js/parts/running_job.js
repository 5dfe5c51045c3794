// The job that is being done, in a word, with the way to it: for pages that are about something else.

import { html } from "../lib.js";
import { percent, plural } from "../core/format.js";
import { titleOf, underWay } from "../core/job_words.js";
import { linkTo } from "../core/router.js";

export function RunningJob() {
  const all = underWay.value;
  if (all.length === 0) return null;
  const [first] = all;
  const isRunning = first.status === "running";
  const others = all.length - 1;
  return html`<a class="button running-job" href=${all.length === 1 ? linkTo("jobs", first.id) : linkTo("jobs")}>
    <span class="dot ${isRunning ? "busy" : ""}" aria-hidden="true"></span>
    <span class="running-job-title">${titleOf(first)}</span>
    <span class="faint">${isRunning ? percent(first.progress ?? 0) : "waits"}${others > 0 && ` and ${plural(others, "job")} more`}</span>
  </a>`;
}
