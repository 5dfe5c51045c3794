// Shows the short messages of core/toasts.js, and says them to a screen reader.

import { html } from "../lib.js";
import { dismiss, toasts } from "../core/toasts.js";
import { Icon } from "./icons.js";

export function Toasts() {
  const of = (kind) => toasts.value.filter((toast) => toast.kind === kind);
  const item = (toast) => html`<div key=${toast.id} class="toast ${toast.kind}">
    <span>${toast.text}</span>
    <button type="button" class="icon-button" aria-label="Dismiss" onClick=${() => dismiss(toast.id)}><${Icon} name="close" /></button>
  </div>`;
  // The regions are there before their first message: a region that appears with its text is not read.
  return html`<div class="toasts">
    <div role="status">${of("info").map(item)}</div>
    <div role="alert">${of("error").map(item)}</div>
  </div>`;
}
