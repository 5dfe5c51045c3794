// Get a model from the Hub, and see how far each pull is.

import { html, useRef, useState } from "../lib.js";
import { ago, percent } from "../core/format.js";
import { useNow } from "../core/now.js";
import { call } from "../core/api.js";
import { jobs } from "../core/state.js";
import { attempt } from "../core/toasts.js";
import { Progress } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";

const NAME = /^(starter|[\w.-]+\/[\w.-]+)$/;
// What comes along when the name is copied from a browser's address bar.
const PASTED = /^https?:\/\/[^/]+\//;
const IS_UNDER_WAY = new Set(["queued", "running"]);
const SHOWN_DONE = 3;

/** Pulls under way, then the latest that ended. */
function pulls() {
  const all = [...jobs.value.values()].filter((job) => job.kind === "pull").sort((a, b) => (b.created ?? 0) - (a.created ?? 0));
  const active = all.filter((job) => IS_UNDER_WAY.has(job.status));
  return [...active, ...all.filter((job) => !IS_UNDER_WAY.has(job.status)).slice(0, SHOWN_DONE)];
}

export function Pull() {
  const field = useRef(null);
  const [fault, setFault] = useState("");
  const [revision, setRevision] = useState("");
  const shown = pulls();

  const submit = async (event) => {
    event.preventDefault();
    const name = field.current.value.trim().replace(PASTED, "").replace(/\/+$/, "");
    if (!NAME.test(name)) {
      setFault(name ? `“${name}” is not a repository; use organisation/name, or starter.` : "Name a repository as organisation/name, or starter.");
      field.current.focus();
      return;
    }
    setFault("");
    const config = revision.trim() ? { name, revision: revision.trim() } : { name };
    try {
      await call("POST", "api/jobs", { kind: "pull", config });
      field.current.value = "";
      setRevision("");
    } catch (err) {
      setFault(err.message);
    }
  };

  return html`<section class="panel" aria-labelledby="pull-title">
    <h2 id="pull-title" class="section-title">Pull</h2>
    <form class="pull" onSubmit=${submit} novalidate>
      <label class="field grow"><span class="visually-hidden">Model to pull</span>
        <input class="input" ref=${field} name="model" placeholder="organisation/name, or starter" autocomplete="off" autocapitalize="off" spellcheck=${false}
          aria-invalid=${fault ? "true" : undefined} aria-describedby="pull-fault" /></label>
      <label class="field revision"><span class="visually-hidden">Revision, optional</span>
        <input class="input" name="revision" placeholder="revision (main)" autocomplete="off" autocapitalize="off" spellcheck=${false} value=${revision} onInput=${(event) => setRevision(event.target.value)} /></label>
      <button class="button primary"><${Icon} name="load" />Pull</button>
    </form>
    <p id="pull-fault" class="fault" role="alert">${fault}</p>
    ${shown.length > 0 && html`<ul class="jobs">${shown.map((job) => html`<${Job} key=${job.id} job=${job} />`)}</ul>`}
  </section>`;
}

function Job({ job }) {
  const nowMs = useNow(!IS_UNDER_WAY.has(job.status));
  const active = IS_UNDER_WAY.has(job.status);
  const name = job.config?.name ?? job.id;
  return html`<li class="job job-${job.status}" aria-label="Pull of ${name}">
    <div class="job-head"><strong>${name}</strong>
      <span class="faint">${active ? job.message || job.status : job.status === "done" ? `done ${ago(job.ended ?? job.created, nowMs)}` : job.status}</span>
      <span class="spread"></span>
      ${active && html`<span class="row-side">${percent(job.progress ?? 0)}</span>
        <button type="button" class="button small" aria-label="Cancel the pull of ${name}" onClick=${() => attempt(() => call("POST", `api/jobs/${encodeURIComponent(job.id)}/cancel`))}>Cancel</button>`}
    </div>
    ${active && html`<${Progress} value=${job.progress ?? 0} label="Pull of ${name}" />`}
    ${job.error && html`<p class="bad">${job.error}</p>`}
  </li>`;
}
