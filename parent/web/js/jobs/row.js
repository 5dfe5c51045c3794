// One job in the list, and the parts that its own view shares with it.

import { html, memo } from "../lib.js";
import { call } from "../core/api.js";
import { ago, percent, span } from "../core/format.js";
import { isUnderWay, subject, titleOf } from "../core/job_words.js";
import { useNow } from "../core/now.js";
import { linkTo } from "../core/router.js";
import { attempt } from "../core/toasts.js";
import { Progress } from "../parts/bits.js";
import { confirm } from "../parts/dialog.js";

/** A job's status in a word and a colour. */
export function JobStatus({ status }) {
  return html`<span class="badge job-is-${status}"><span class="dot" aria-hidden="true"></span>${status}</span>`;
}

/** How long it has been waiting or running, or when it ended and what it took. */
export function Times({ job }) {
  const nowMs = useNow(true);
  if (isUnderWay(job)) {
    const running = job.started !== null;
    return html`<span>${running ? "for" : "waits for"} ${span(Math.floor(Math.max(0, nowMs / 1000 - (job.started ?? job.created))))}</span>`;
  }
  const took = job.started === null || job.ended === null ? "" : ` · took ${span(job.ended - job.started)}`;
  return html`<span>${ago(job.ended ?? job.created, nowMs)}${took}</span>`;
}

/** End a job, once a person is sure. */
export async function cancelJob(job) {
  const isRunning = job.status === "running";
  const sure = await confirm({
    title: `Cancel ${titleOf(job)}?`,
    text: isRunning ? `It is at ${percent(job.progress ?? 0)}. ${job.kind === "pull" ? "Pulling it again goes on from here." : "What it has done so far is thrown away."}` : "It has not begun.",
    action: "Cancel the job",
    keep: "Keep it",
  });
  if (sure) await attempt(() => call("POST", `api/jobs/${encodeURIComponent(job.id)}/cancel`));
}

export const JobRow = memo(({ job }) => {
  const active = isUnderWay(job);
  const made = job.config?.name && job.config.name !== subject(job) ? job.config.name : null;
  return html`<li class="job-row" aria-label=${titleOf(job)}>
    <a class="job-row-link" href=${linkTo("jobs", job.id)}>
      <span class="job-kind">${job.kind}</span>
      <span class="job-what">${subject(job) || job.id}${made && html` <span class="faint">→ ${made}</span>`}</span>
    </a>
    <${JobStatus} status=${job.status} />
    <div class="job-row-side">${active && html`<span>${percent(job.progress ?? 0)}</span>
      <button type="button" class="button small" aria-label="Cancel ${titleOf(job)}" onClick=${() => cancelJob(job)}>Cancel</button>`}</div>
    <p class="job-note faint">${active && job.message && html`<span>${job.message}</span>`}
      ${job.error && html`<span class="bad">${job.error}</span>`}
      <${Times} job=${job} /></p>
    ${active && html`<div class="job-row-bar"><${Progress} value=${job.progress ?? 0} label="Progress of ${titleOf(job)}" /></div>`}
  </li>`;
});
