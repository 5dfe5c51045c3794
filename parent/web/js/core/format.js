// Numbers as people read them. Sizes are decimal, as on the command line.

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
  return (n ?? 0).toLocaleString("en-US");
}

/** "1 token", "2,048 tokens". */
export function plural(n, word) {
  return `${count(n)} ${word}${n === 1 ? "" : "s"}`;
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

/** How long ago, coarse enough to change rarely. */
export function ago(unixS, nowMs) {
  const s = Math.max(0, nowMs / 1000 - unixS);
  if (s < 5) return "just now";
  return `${span(s < 60 ? Math.floor(s / 5) * 5 : s)} ago`;
}

/** The time of day of unix seconds. */
export function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}

/** 0.434 as "43%". */
export function percent(share) {
  return `${Math.floor(share * 100)}%`;
}

function digits(value) {
  return value >= 99.95 ? String(Math.round(value)) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}
