// Who has the GPU where a job wants it, and the requests that wait, oldest first, each with what it waits for.

import { html } from "../lib.js";
import { plural, span } from "../core/format.js";
import { useNow } from "../core/now.js";
import { poolAt } from "../core/state.js";
import { StateBadge } from "../parts/bits.js";
import { stateOf } from "../core/state.js";

const SHOWN = 8;
const WAITS_FOR = { lease: "for the GPU", memory: "for memory", load: "for its load", place: "for a place" };

export function Queue({ waiting, leases }) {
  // Waiting times were true when they came; they go on from there by the clock, not by asking.
  const nowMs = useNow(waiting.length > 0);
  const since = Math.max(0, nowMs - poolAt.value) / 1000;
  return html`<section class="panel" aria-labelledby="queue-title">
    <h2 id="queue-title" class="section-title">Waiting <span class="count">${waiting.length}</span></h2>
    <${Gpu} leases=${leases} />
    ${waiting.length === 0
      ? html`<p class="quiet">No request waits.</p>`
      : html`<ol class="rows">
          ${waiting.slice(0, SHOWN).map((ticket, i) => html`<li key=${i} class="row">
            <span class="row-main">${ticket.model}</span>
            <${StateBadge} state=${stateOf(ticket.model)} />
            <span class="faint waits-for">${WAITS_FOR[ticket.waits_for]}</span>
            <span class="row-side">${span(Math.floor(ticket.waiting_s + since))}</span>
          </li>`)}
        </ol>
        ${waiting.length > SHOWN && html`<p class="faint">and ${waiting.length - SHOWN} more</p>`}`}
  </section>`;
}

/** Nothing where models have the GPU to themselves. */
function Gpu({ leases }) {
  if (!leases?.holder) return null;
  const before = leases.shared > 0 ? `${leases.holder} waits for ${plural(leases.shared, "request")}` : `${leases.holder} gets it next`;
  return html`<p class="gpu">GPU: ${leases.exclusive ? `held by ${leases.holder}` : before}</p>`;
}
