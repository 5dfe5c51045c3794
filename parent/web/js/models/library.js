// What lies on the disk: GET /api/library, asked for again when an event says that the models have changed.

import { effect, signal, untracked } from "../lib.js";
import { call } from "../core/api.js";
import { models } from "../core/state.js";

/** {models, shadowed, disk_free_bytes}; null until it came. */
export const library = signal(null);

/** Why the library could not be read; empty where it could. */
export const libraryFault = signal("");

let asked = 0;

/** Read it now. */
export async function refresh() {
  const mine = ++asked;
  try {
    const body = await call("GET", "api/library");
    if (mine !== asked) return;
    library.value = body;
    libraryFault.value = "";
  } catch (err) {
    if (mine === asked) libraryFault.value = err.message;
  }
}

/** Keep it current while the calling page is shown: returns how to stop. */
export function follow() {
  let known = null;
  return effect(() => {
    // States move all the time and are known from the pool; which models there are is what matters here.
    const names = models.value?.map((model) => `${model.id} ${model.created}`).join("\n") ?? null;
    if (names !== null && names !== known) {
      known = names;
      untracked(refresh);
    }
  });
}
