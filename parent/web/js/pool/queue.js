// Requests that wait, oldest first: for a load, for an eviction, or for a place in a batch.

import { html } from "../lib.js";
import { span } from "../core/format.js";
import { useNow } from "../core/now.js";
import { poolAt } from "../core/state.js";
import { StateBadge } from "../parts/bits.js";
import { stateOf } from "../core/state.js";

const SHOWN = 8;

export function Queue({ waiting }) {
  // Waiting times were true when they came; they go on from there by the clock, not by asking.
  const nowMs = useNow(waiting.length > 0);
  const since = Math.max(0, nowMs - poolAt.value) / 1000;
  return html`<section class="panel" aria-labelledby="queue-title">
    <h2 id="queue-title" class="section-title">Waiting <span class="count">${waiting.length}</span></h2>
    ${waiting.length === 0
      ? html`<p class="quiet">No request waits.</p>`
      : html`<ol class="rows">
          ${waiting.slice(0, SHOWN).map((ticket, i) => html`<li key=${i} class="row">
            <span class="row-main">${ticket.model}</span>
            <${StateBadge} state=${stateOf(ticket.model)} />
            <span class="row-side">${span(Math.floor(ticket.waiting_s + since))}</span>
          </li>`)}
        </ol>
        ${waiting.length > SHOWN && html`<p class="faint">and ${waiting.length - SHOWN} more</p>`}`}
  </section>`;
}
