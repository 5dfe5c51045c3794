// Numbers as people read them. Sizes are decimal, as on the command line.

// Made once: making one costs a thousand times what using it does.
const WHOLE = new Intl.NumberFormat("en-US");
const CLOCK = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const MINUTE = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** Three digits that matter: 1.24 GB, 271 MB, 0 B. */
export function bytes(n) {
  let value = Math.max(0, n ?? 0);
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit++;
  }
  return `${unit === 0 ? Math.round(value) : digits(value)} ${UNITS[unit]}`;
}

/** A worker's memory: what it uses of its plan, or the plan alone until it has been measured. */
export function used(worker) {
  const planned = bytes(worker.planned_bytes);
  return worker.footprint_bytes ? `${bytes(worker.footprint_bytes)} of ${planned}` : `${planned} reserved`;
}

/** Whole numbers with separators. */
export function count(n) {
  return WHOLE.format(n ?? 0);
}

/** "1 token", "2,048 tokens". */
export function plural(n, word, words = `${word}s`) {
  return `${count(n)} ${n === 1 ? word : words}`;
}

/** Tokens per second. */
export function rate(n) {
  return n ? digits(n) : "0";
}

/** A time span in its largest useful unit: 0.31 s, 12 s, 4 min, 3 h, 2 d. */
export function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 10) return Number.isInteger(s) ? `${s} s` : `${s.toFixed(s < 1 ? 2 : 1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 129_600) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86_400)} d`;
}

/** How long a state has lasted, in steps: a text that changes every second is a frame every second. */
export function lasted(seconds) {
  return span(seconds < 60 ? Math.floor(Math.max(0, seconds) / 5) * 5 : seconds);
}

/** How long ago, coarse enough to change rarely. */
export function ago(unixS, nowMs) {
  const s = Math.max(0, nowMs / 1000 - unixS);
  if (s < 5) return "just now";
  return `${lasted(s)} ago`;
}

/** The time of day of unix seconds. */
export function clock(unixS) {
  return CLOCK.format(unixS * 1000);
}

/** The same without its seconds. */
export function minute(unixS) {
  return MINUTE.format(unixS * 1000);
}

/** 0.434 as "43%". */
export function percent(share) {
  return `${Math.floor(share * 100)}%`;
}

function digits(value) {
  return value >= 99.95 ? String(Math.round(value)) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}
