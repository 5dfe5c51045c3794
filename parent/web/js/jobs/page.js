// The jobs of this machine: #/jobs lists them, #/jobs/new[/KIND] is the form of a new one, #/jobs/ID one of them.

import { html } from "../lib.js";
import { connection } from "../core/live.js";
import { ended, underWay } from "../core/job_words.js";
import { linkTo, route } from "../core/router.js";
import { Empty, Waiting } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { Heading } from "../parts/shell.js";
import { Detail } from "./detail.js";
import { NewJob } from "./form.js";
import { JobRow } from "./row.js";

const NEW = "new";

export function JobsPage() {
  const [first, ...rest] = route.value.rest.split("/");
  if (first === NEW) return html`<${NewJob} kind=${rest.join("/")} params=${route.value.params} />`;
  return first ? html`<${Detail} key=${route.value.rest} id=${route.value.rest} />` : html`<${List} />`;
}

function List() {
  const active = underWay.value;
  const past = ended.value;
  const isKnown = connection.value.state === "open" || active.length + past.length > 0;
  return html`<div class="page">
    <div class="page-head">
      <${Heading}>Jobs<//>
      <a class="button primary" href=${linkTo("jobs", NEW)}><${Icon} name="plus" />New job</a>
    </div>
    ${!isKnown && html`<section class="panel"><${Waiting} label="Waiting for the jobs" /></section>`}
    ${isKnown && active.length + past.length === 0 && html`<section class="panel"><${Empty} title="There are no jobs yet">
      <p>Making a smaller model, teaching one, measuring one, fetching one: each is a job.</p><//></section>`}
    ${active.length > 0 && html`<${Section} id="active" title="Under way" jobs=${active} />`}
    ${past.length > 0 && html`<${Section} id="ended" title="Ended" jobs=${past} />`}
  </div>`;
}

function Section({ id, title, jobs }) {
  return html`<section class="panel" aria-labelledby="${id}-title">
    <h2 id="${id}-title" class="section-title">${title} <span class="count">${jobs.length}</span></h2>
    <ul class="job-rows">${jobs.map((job) => html`<${JobRow} key=${job.id} job=${job} />`)}</ul>
  </section>`;
}
