// What happened lately: loads, evictions, crashes, each with its reason.

import { html, memo, useState } from "../lib.js";
import { clock, plural } from "../core/format.js";
import { eventKey } from "../core/live.js";

const WORDS = {
  load: "load",
  ready: "ready",
  evict: "evicted",
  drain: "finishing",
  loss: "not saved",
  stop: "stopped",
  gone: "gone",
  crash: "crashed",
  failed: "failed",
  cancel: "cancelled",
  lease: "GPU lent",
  release: "GPU back",
};
const SHOWN = 12;

/** A process is gone because it failed or crashed: the failure has said so already. */
function isEcho(event, events) {
  return event.event === "gone" && events.some((other) => other.model === event.model && other !== event
    && (other.event === "failed" || other.event === "crash") && other.detail === event.detail);
}

export const Recent = memo(({ events, loads, evictions, crashes }) => {
  const [all, setAll] = useState(false);
  const told = events.filter((event) => !isEcho(event, events));
  const shown = all ? told : told.slice(0, SHOWN);
  return html`<section class="panel" aria-labelledby="recent-title">
    <div class="budget-head">
      <h2 id="recent-title" class="section-title">Recent</h2>
      <p class="faint">${plural(loads, "load")} · ${plural(evictions, "eviction")} · ${plural(crashes, "crash", "crashes")}</p>
    </div>
    ${events.length === 0
      ? html`<p class="quiet">Nothing has happened since the server started.</p>`
      : html`<ol class="rows events">
          ${shown.map((event) => html`<li key=${eventKey(event)} class="row event-${event.event}">
            <time class="row-time" dateTime=${new Date(event.time * 1000).toISOString()}>${clock(event.time)}</time>
            <span class="event-kind">${WORDS[event.event] ?? event.event}</span>
            <span class="row-main"><strong>${event.model}</strong>${event.detail && html` <span class="detail">${event.detail}</span>`}</span>
          </li>`)}
        </ol>
        ${told.length > SHOWN && html`<button type="button" class="button small" aria-expanded=${all} onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${told.length}`}</button>`}`}
  </section>`;
});
