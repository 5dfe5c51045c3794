// The pool: how much memory is spoken for, who holds it, who waits, and what just happened.

import { html, useEffect, useState } from "../lib.js";
import { load } from "../core/actions.js";
import { models, pool, recent } from "../core/state.js";
import { bytes } from "../core/format.js";
import { go } from "../core/router.js";
import { Empty, Waiting } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { ModelPicker } from "../parts/model_picker.js";
import { RunningJob } from "../parts/running_job.js";
import { Heading } from "../parts/shell.js";
import { Budget } from "./budget.js";
import { Prompts } from "./prompts.js";
import { Queue } from "./queue.js";
import { Recent } from "./recent.js";
import { WorkerCard } from "./worker_card.js";

const ORDER = ["ready", "loading", "starting", "draining", "stopping", "failed", "absent"];
// A first look offers a few models to begin with; the picker has them all.
const OFFERED = 4;

export function PoolPage() {
  const [picking, setPicking] = useState(false);
  const view = pool.value;
  const workers = [...(view?.workers ?? [])].sort(
    (a, b) => ORDER.indexOf(a.state) - ORDER.indexOf(b.state) || a.model.localeCompare(b.model),
  );
  const isUp = new Set(workers.filter((w) => w.state !== "absent" && w.state !== "failed").map((w) => w.model));
  return html`<div class="page">
    <div class="page-head">
      <${Heading}>Pool<//>
      <div class="page-actions"><${RunningJob} />
        <button type="button" class="button primary" onClick=${() => setPicking(true)}><${Icon} name="load" />Load a model</button></div>
    </div>
    ${view === null
      ? html`<${Waiting} label="Waiting for the pool" />`
      : html`
        <${Budget} view=${view} />
        <section aria-labelledby="workers-title">
          <h2 id="workers-title" class="section-title">Workers <span class="count">${workers.length}</span></h2>
          ${workers.length === 0
            ? html`<${NothingLoaded} onMore=${() => setPicking(true)} />`
            : html`<ul class="cards">${workers.map((worker) => html`<${WorkerCard} key=${worker.model} worker=${worker} />`)}</ul>`}
        </section>
        <${Prompts} cache=${view.cache} />
        <div class="columns">
          <${ThroughputLater} />
          <${Queue} waiting=${view.queue} leases=${view.leases} />
        </div>
        <${Recent} events=${recent.value} ...${view.counters} />`}
    ${picking && html`<${ModelPicker} title="Load a model" offered=${(model) => !isUp.has(model.id)} onPick=${load} onClose=${() => setPicking(false)} />`}
  </div>`;
}

/** The chart, once it has been fetched; until then the room it takes. */
function ThroughputLater() {
  const [Throughput, setThroughput] = useState(null);
  useEffect(() => {
    // Where it can't be had the server is gone, which the bar says; the next visit of this page tries again.
    import("./throughput.js").then((module) => setThroughput(() => module.Throughput), () => {});
  }, []);
  return Throughput ? html`<${Throughput} />` : html`<section class="panel throughput-room"></section>`;
}

function NothingLoaded({ onMore }) {
  const some = models.value ?? [];
  if (models.value !== null && some.length === 0) {
    return html`<${Empty} title="There are no models here yet">
      <p>Pull one, and it is loaded by the first request that names it.</p>
      <button type="button" class="button" onClick=${() => go("models")}>Go to Models</button>
    <//>`;
  }
  return html`<${Empty} title="No model is loaded">
    <p>A request that names a model loads it. Or load one now:</p>
    <div class="chips">
      ${some.slice(0, OFFERED).map((model) => html`<button type="button" key=${model.id} class="chip" onClick=${() => load(model.id)}>
        ${model.id}${model.planned_bytes !== null && html`<span class="faint">${bytes(model.planned_bytes)}</span>`}</button>`)}
      ${some.length > OFFERED && html`<button type="button" class="chip" onClick=${onMore}>${some.length - OFFERED} more…</button>`}
    </div>
  <//>`;
}
