// The memory budget as one bar: what each worker has reserved, how much of that it really uses, what is left.

import { html } from "../lib.js";
import { bytes, percent, used } from "../core/format.js";

const HOLDS_WEIGHTS = new Set(["loading", "ready", "draining", "stopping"]);

/** What the whole bar stands for, in bytes. */
function wholeOf(view) {
  return Math.max(view.budget_bytes, view.reserved_bytes + view.prompt_cache_bytes, 1);
}

/** Workers that hold memory, as shares of the bar. Where plans overrun the budget the bar is their sum. */
export function segments(view) {
  const whole = wholeOf(view);
  return view.workers
    .filter((worker) => HOLDS_WEIGHTS.has(worker.state) || (worker.state === "starting" && worker.footprint_bytes > 0))
    .map((worker) => ({
      worker,
      share: worker.planned_bytes / whole,
      filled: worker.planned_bytes ? Math.min(1, worker.footprint_bytes / worker.planned_bytes) : 0,
      over: worker.footprint_bytes > worker.planned_bytes,
    }))
    .sort((a, b) => b.share - a.share || a.worker.model.localeCompare(b.worker.model));
}

export function Budget({ view }) {
  const parts = segments(view);
  const held = parts.reduce((sum, part) => sum + part.worker.planned_bytes, 0);
  const other = Math.max(0, view.reserved_bytes - held);
  const prompts = view.prompt_cache_bytes;
  const whole = wholeOf(view);
  const free = Math.max(0, view.budget_bytes - view.reserved_bytes - prompts);
  return html`<section class="panel budget" aria-labelledby="budget-title">
    <div class="budget-head">
      <h2 id="budget-title" class="section-title">Memory</h2>
      <p class="budget-sum"><strong>${bytes(view.reserved_bytes)}</strong> reserved of ${bytes(view.budget_bytes)}
        <span class="faint"> · ${bytes(free)} free</span></p>
    </div>
    <div class="budget-bar" role="img" aria-label="${bytes(view.reserved_bytes)} of ${bytes(view.budget_bytes)} are reserved, ${percent(view.reserved_bytes / whole)}">
      ${parts.map((part) => html`<div key=${part.worker.model} class="segment state-${part.worker.state} ${part.over ? "over" : ""}" style=${{ flexBasis: `${part.share * 100}%` }}
          title="${part.worker.model}: ${used(part.worker)}">
        <div class="segment-used" style=${{ transform: `scaleX(${part.filled})` }}></div>
      </div>`)}
      ${other > 0 && html`<div class="segment other" style=${{ flexBasis: `${(other / whole) * 100}%` }} title="${bytes(other)} reserved for caches and processes"></div>`}
      ${prompts > 0 && html`<div class="segment prompts" style=${{ flexBasis: `${(prompts / whole) * 100}%` }} title="${bytes(prompts)} for prompts"></div>`}
    </div>
    ${(parts.length > 0 || prompts > 0) && html`<ul class="legend">
      ${parts.map((part) => html`<li key=${part.worker.model}><span class="swatch state-${part.worker.state}" aria-hidden="true"></span>
        <span class="legend-name">${part.worker.model}</span>
        <span class="faint">${used(part.worker)}${part.over && html` <strong class="bad">over its plan</strong>`}</span></li>`)}
      ${other > 0 && html`<li key="other"><span class="swatch other" aria-hidden="true"></span><span class="faint">${bytes(other)} caches and processes</span></li>`}
      ${prompts > 0 && html`<li key="prompts"><span class="swatch prompts" aria-hidden="true"></span><span class="faint">${bytes(prompts)} for prompts</span></li>`}
    </ul>`}
  </section>`;
}
