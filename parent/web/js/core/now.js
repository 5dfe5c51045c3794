// The time, for texts like "4 s ago": one timer for all of them, and none while nobody looks.

import { signal, useEffect } from "../lib.js";

const TICK_MS = 1_000;

/** Unix milliseconds, a second exact while something uses it. */
export const now = signal(Date.now());

let users = 0;
let timer = 0;

/** Keep `now` moving while the calling component is shown and `wanted`; else the time of `instead`, a signal. */
export function useNow(wanted = true, instead = now) {
  useEffect(() => {
    if (!wanted) return undefined;
    if (users++ === 0) timer = setInterval(() => { if (!document.hidden) now.value = Date.now(); }, TICK_MS);
    now.value = Date.now();
    return () => {
      if (--users === 0) clearInterval(timer);
    };
  }, [wanted]);
  return wanted ? now.value : instead.value;
}
