// Short messages at the edge of the page: what was done, and what went wrong.

import { signal } from "../lib.js";

const SHOWN_MS = 5_000;
// An error has to be read, and often copied.
const ERROR_SHOWN_MS = 12_000;

/** {id, kind: "info" | "error", text}, oldest first. */
export const toasts = signal([]);

let counter = 0;

/** Show a message. */
export function say(text, kind = "info") {
  const id = ++counter;
  toasts.value = [...toasts.value.filter((toast) => toast.text !== text).slice(-3), { id, kind, text }];
  setTimeout(() => dismiss(id), kind === "error" ? ERROR_SHOWN_MS : SHOWN_MS);
}

/** Take a message away. */
export function dismiss(id) {
  toasts.value = toasts.value.filter((toast) => toast.id !== id);
}

/** Run an action; its failure becomes a message. True when it worked. */
export async function attempt(action) {
  try {
    await action();
    return true;
  } catch (err) {
    if (err.status !== 401) say(err.message, "error"); // a 401 shows the login
    return false;
  }
}
