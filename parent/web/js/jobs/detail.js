// One job: how far it is, its curves, its result or its failure, what it was asked for, what it says.

import { html, useEffect, useState } from "../lib.js";
import { call } from "../core/api.js";
import { clock, percent, span } from "../core/format.js";
import { isUnderWay, titleOf } from "../core/job_words.js";
import { connection } from "../core/live.js";
import { linkTo } from "../core/router.js";
import { jobs } from "../core/state.js";
import { Empty, Progress, Waiting } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { Heading } from "../parts/shell.js";
import { Figures } from "./figures.js";
import { JobLog } from "./log.js";
import { Result } from "./result.js";
import { JobStatus, Times, cancelJob } from "./row.js";
import { inWords } from "./values.js";
import { useRecord } from "./watch.js";

/** The row: as events say, else as it was asked for; null until it is known, false where there is none. */
function useRow(id) {
  const [asked, setAsked] = useState(null);
  const live = jobs.value.get(id);
  const isOpen = connection.value.state === "open";
  useEffect(() => {
    if (live) setAsked(live);
    if (live || !isOpen) return undefined;
    let gone = false;
    call("GET", `api/jobs/${encodeURIComponent(id)}`).then(
      (row) => gone || setAsked(row),
      (err) => gone || err.status !== 404 || setAsked(false),
    );
    return () => {
      gone = true;
    };
  }, [id, live, isOpen]);
  return live ?? asked;
}

export function Detail({ id }) {
  const job = useRow(id);
  useEffect(() => {
    if (job) document.title = `${titleOf(job)} · mlxpool`;
  }, [job && titleOf(job)]);
  return html`<div class="page job-page">
    <a class="link job-back" href=${linkTo("jobs")}>All jobs</a>
    ${job === null && html`<div class="page-head"><${Heading}>Job<//></div><section class="panel"><${Waiting} label="Waiting for the job" /></section>`}
    ${job === false && html`<div class="page-head"><${Heading}>No such job<//></div>
      <section class="panel"><${Empty} title="There is no job ${id} here"><p>The last 200 that ended are kept.</p><//></section>`}
    ${job && html`<${Known} job=${job} />`}
  </div>`;
}

function Known({ job }) {
  const { seen, fault } = useRecord(job.id);
  const active = isUnderWay(job);
  return html`
    <div class="page-head">
      <${Heading}>${titleOf(job)}<//>
      <div class="job-actions">
        <span role="status"><${JobStatus} status=${job.status} /></span>
        ${active
          ? html`<button type="button" class="button" onClick=${() => cancelJob(job)}>Cancel</button>`
          : html`<a class="button" href="${linkTo("jobs", `new/${job.kind}`)}?from=${encodeURIComponent(job.id)}"><${Icon} name="retry" />Run again</a>`}
      </div>
    </div>
    ${fault && active && html`<p class="strip-note" role="alert">Its events don't come: ${fault}. Trying again.</p>`}
    <section class="panel" aria-labelledby="job-progress">
      <div class="budget-head"><h2 id="job-progress" class="section-title">Progress</h2>
        <p class="faint"><${Times} job=${job} /></p></div>
      ${active && html`<div class="job-bar"><${Progress} value=${job.progress ?? 0} label="Progress" /><strong>${percent(job.progress ?? 0)}</strong></div>`}
      ${active && job.message && html`<p class="job-message">${job.message}</p>`}
      ${job.error && html`<pre class="reason" tabindex="0" role="group" aria-label="Why">${job.error}</pre>`}
      ${!active && !job.error && job.message && job.message !== job.status && html`<p class="job-message">${job.message}</p>`}
      <${Stages} stages=${seen.stages} endedAt=${job.ended} />
    </section>
    ${job.result && html`<${Result} job=${job} />`}
    ${seen.series.size > 0 && html`<${Figures} seen=${seen} />`}
    <${Config} job=${job} />
    <${JobLog} seen=${seen} id=${job.id} active=${active} />`;
}

function Stages({ stages, endedAt }) {
  if (stages.length === 0) return null;
  return html`<ol class="rows stages" aria-label="Stages">
    ${stages.map((stage, i) => {
      const end = stages[i + 1]?.since ?? endedAt;
      const isNow = !end;
      return html`<li key=${i} class="row" aria-current=${isNow ? "step" : undefined}>
        <time class="row-time" dateTime=${new Date(stage.since * 1000).toISOString()}>${clock(stage.since)}</time>
        <span class="stage-name">${stage.name}</span>
        <span class="row-main faint">${stage.message}</span>
        <span class="row-side">${isNow ? "now" : span(end - stage.since)}</span>
      </li>`;
    })}
  </ol>`;
}

function Config({ job }) {
  const entries = Object.entries(job.config ?? {});
  return html`<section class="panel" aria-labelledby="job-config">
    <h2 id="job-config" class="section-title">Settings</h2>
    <dl class="job-facts">
      ${entries.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${inWords(value)}</dd></div>`)}
      <div key=" id"><dt>id</dt><dd><code>${job.id}</code></dd></div>
    </dl>
  </section>`;
}
