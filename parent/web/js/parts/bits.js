// Small parts that several pages share.

import { html } from "../lib.js";
import { percent } from "../core/format.js";

const WORDS = {
  absent: "not loaded",
  starting: "starting",
  loading: "loading",
  ready: "ready",
  draining: "finishing",
  stopping: "stopping",
  failed: "failed",
};

/** A model's state in a word and a colour. */
export function StateBadge({ state }) {
  return html`<span class="badge state-${state}"><span class="dot" aria-hidden="true"></span>${WORDS[state] ?? state}</span>`;
}

/** A progress bar. value: 0 to 1, null while nobody knows. */
export function Progress({ value, label }) {
  const now = value === null ? undefined : Math.floor(value * 100);
  return html`<div class="progress ${value === null ? "unknown" : ""}" role="progressbar" aria-label=${label}
      aria-valuemin="0" aria-valuemax="100" aria-valuenow=${now} aria-valuetext=${value === null ? "starting" : percent(value)}>
    <div class="progress-fill" style=${{ transform: `scaleX(${value ?? 0})` }}></div>
  </div>`;
}

/** What a page shows where there is nothing to show. */
export function Empty({ title, children }) {
  return html`<div class="empty"><p class="empty-title">${title}</p>${children}</div>`;
}

/** Grey lines in place of what has not come yet. */
export function Waiting({ label }) {
  return html`<div class="waiting" role="status"><span class="visually-hidden">${label}</span><span></span><span></span><span></span></div>`;
}
