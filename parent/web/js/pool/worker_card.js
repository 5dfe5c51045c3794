// One model's worker: what it does, what it takes, and what a person can tell it.

import { html, useState } from "../lib.js";
import { load, pin, switchModel, unload } from "../core/actions.js";
import { ago, bytes, lasted, percent, plural, rate, used } from "../core/format.js";
import { useNow } from "../core/now.js";
import { linkTo } from "../core/router.js";
import { loadProgress, poolAt } from "../core/state.js";
import { Progress, StateBadge } from "../parts/bits.js";
import { confirm } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";
import { ModelPicker } from "../parts/model_picker.js";

const IS_COMING = new Set(["starting", "loading"]);
const IS_GOING = new Set(["draining", "stopping"]);

export function WorkerCard({ worker }) {
  const [picking, setPicking] = useState(false);
  const { model, state } = worker;
  const isLeaving = worker.unloading || IS_GOING.has(state);
  const isDown = state === "failed" || state === "absent";
  return html`<li class="card state-${state}" aria-label=${model}>
    <div class="card-head">
      <h3 class="card-title">${model}</h3>
      ${worker.pinned && html`<span class="pinned" title="Pinned: never evicted"><${Icon} name="pin" /><span class="visually-hidden">pinned</span></span>`}
      <${StateBadge} state=${state} />
    </div>
    ${IS_COMING.has(state) ? html`<${Loading} worker=${worker} />` : isDown ? html`<${Reason} worker=${worker} />` : html`<${Figures} worker=${worker} />`}
    <div class="card-actions">
      ${isDown
        ? html`<button type="button" class="button small" onClick=${() => load(model)}>${state === "failed" ? "Try again" : "Load"}</button>`
        : html`
          <button type="button" class="button small" disabled=${isLeaving && worker.active + worker.queued === 0} onClick=${() => unloadOrForce(worker, isLeaving)}>${isLeaving ? "End now" : IS_COMING.has(state) ? "Cancel" : "Unload"}</button>
          <button type="button" class="button small" disabled=${isLeaving} onClick=${() => setPicking(true)}>Switch…</button>`}
      <button type="button" class="button small" aria-pressed=${worker.pinned} onClick=${() => pin(model, !worker.pinned)}>${worker.pinned ? "Unpin" : "Pin"}</button>
      <span class="spread"></span>
      <a class="link" href=${linkTo("logs", model)} aria-label="Logs of ${model}">Logs</a>
      <a class="link" href="${linkTo("chat")}?model=${encodeURIComponent(model)}" aria-label="Chat with ${model}">Chat</a>
    </div>
    ${picking && html`<${ModelPicker} title="Switch from ${model} to" offered=${(other) => other.id !== model} onPick=${(other) => switchModel(model, other)} onClose=${() => setPicking(false)} />`}
  </li>`;
}

/** A first Unload lets running answers end; only a second one cuts them, and asks. */
async function unloadOrForce(worker, isLeaving) {
  if (!isLeaving) {
    await unload(worker.model);
    return;
  }
  const sure = await confirm({
    title: `End ${worker.model} now?`,
    text: "It is finishing the answers that are under way. Ending it now cuts them off with an error.",
    action: "End now",
  });
  if (sure) await unload(worker.model, true);
}

function Loading({ worker }) {
  const share = loadProgress(worker);
  const words = worker.state === "starting" ? "Starting its process" : share === null ? "Loading" : `${bytes(worker.loaded_bytes)} of ${bytes(worker.total_bytes)}`;
  return html`<div class="card-loading">
    <${Progress} value=${share} label="Loading ${worker.model}" />
    <p class="faint"><span>${words}</span>${share !== null && html`<span>${percent(share)}</span>`}</p>
    ${worker.queued > 0 && html`<p class="faint">${worker.queued} waiting for it${worker.unloading ? "; it goes once they are answered" : ""}</p>`}
  </div>`;
}

function Reason({ worker }) {
  return html`<div class="card-reason">${worker.reason ? html`<pre class="reason" tabindex="0" role="group" aria-label="Why">${worker.reason}</pre>` : html`<p class="faint">Not loaded. It is pinned: once loaded it stays.</p>`}</div>`;
}

function Figures({ worker }) {
  const idle = worker.active === 0 && worker.queued === 0;
  // A busy worker's figures come every second anyway: its times are as of then, one frame instead of two.
  const nowMs = useNow(idle, poolAt);
  return html`<dl class="figures">
    <div class="figure-main"><dt>tokens/s</dt><dd>${worker.active > 0 ? rate(worker.tokens_per_s) : "–"}</dd></div>
    <div><dt>running</dt><dd>${worker.active}</dd></div>
    <div><dt>waiting</dt><dd>${worker.queued}</dd></div>
  </dl>
  <p class="card-memory"><span class="faint">Memory</span><span>${used(worker)}</span></p>
  <div class="meter" aria-hidden="true"><div style=${{ transform: `scaleX(${worker.planned_bytes ? Math.min(1, worker.footprint_bytes / worker.planned_bytes) : 0})` }}></div></div>
  <p class="card-foot faint">
    <span>${idle && worker.last_used ? `last used ${ago(worker.last_used, nowMs)}` : `${worker.state === "ready" ? "ready" : "finishing"} for ${lasted(nowMs / 1000 - worker.since)}`}</span>
    ${worker.cache !== null && worker.cache.hits + worker.cache.misses > 0 && html`<span>${worker.cache.hits} of ${plural(worker.cache.hits + worker.cache.misses, "prompt")} cached</span>`}
    ${worker.pid !== null && html`<span>pid ${worker.pid}</span>`}
    ${worker.restarts > 0 && html`<span class="warn">${worker.restarts} restarts</span>`}
  </p>`;
}
