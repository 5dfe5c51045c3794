// What one job has told so far, put together from its events; plain data and no drawing.
//
// Owned by the view that shows the job. Events carry the byte of the log behind them, which only grows: one that
// was seen is known by it, so a stream may begin anywhere before what is missing. A job may tell for days, so
// lines are the last ones and curves are thinned.

import { bare } from "../core/log_lines.js";

// What a person scrolls back through; the whole log is a file.
export const KEPT_LINES = 1_000;
// More than a chart has dots across. A curve that reaches it loses every other point, except its last.
export const MAX_POINTS = 8_000;
// What a kind may call the figure that the others are as of, the first of these that it tells.
const STEPS = ["iteration", "step", "lines", "tokens"];
const ENDS = new Set(["done", "failed", "cancelled", "interrupted"]);

export class Record {
  constructor() {
    this.clear();
  }

  /** Forget everything: the log is another one. */
  clear() {
    this.offset = 0;
    this.started = null;
    this.stages = [];
    this.lines = [];
    this.lineCount = 0;
    this.metricCount = 0;
    this.stepName = null;
    this.series = new Map();
    this.end = null;
  }

  /** Take one event that ends at this byte of the log. False where it was known. */
  take(offset, event) {
    if (offset <= this.offset) return false;
    this.offset = offset;
    if (event.type === "started") this.started = event.time;
    else if (event.type === "stage") this.#stage(event);
    else if (event.type === "metric") this.#metric(event.values);
    else if (event.type === "log") this.#line(event.line);
    else if (ENDS.has(event.type)) this.end = event;
    return true;
  }

  /** What there is to draw now: {stages, series, stepName, lines: [{n, text}], lineCount}; the lines the last ones. */
  view() {
    const { stages, series, stepName, lines, lineCount } = this;
    return { stages, series, stepName, lines: lines.slice(-KEPT_LINES), lineCount };
  }

  #stage({ name, message, time }) {
    const last = this.stages.at(-1);
    const stage = { name, message: message ?? "", since: last?.name === name ? last.since : time };
    // The array is another one where something changed: who draws it compares.
    this.stages = [...(last?.name === name ? this.stages.slice(0, -1) : this.stages), stage];
  }

  #line(text) {
    this.lines.push({ n: ++this.lineCount, text: bare(text) });
    if (this.lines.length >= 2 * KEPT_LINES) this.lines = this.lines.slice(-KEPT_LINES);
  }

  #metric(values) {
    const ordinal = ++this.metricCount;
    const step = STEPS.find((name) => Number.isFinite(values[name]));
    if (step) this.stepName = step;
    for (const [name, value] of Object.entries(values)) {
      if (name === step || !Number.isFinite(value)) continue;
      let points = this.series.get(name);
      if (!points) this.series.set(name, (points = { x: [], y: [], count: 0 }));
      points.x.push(step ? values[step] : ordinal);
      points.y.push(value);
      points.count++;
      if (points.x.length >= MAX_POINTS) thin(points);
    }
  }
}

function thin(points) {
  const stays = (_, i, all) => (all.length - 1 - i) % 2 === 0;
  points.x = points.x.filter(stays);
  points.y = points.y.filter(stays);
}

/** Names of figures that are drawn together: all losses are one chart, anything else its own. */
export function charts(names) {
  const losses = names.filter((name) => /loss/.test(name));
  const others = names.filter((name) => !/loss/.test(name));
  return [...(losses.length ? [{ name: "loss", of: losses }] : []), ...others.map((name) => ({ name, of: [name] }))];
}

/** Curves over one common axis, as the plot wants them: [x, y of the first, …], null where a curve has no point. */
export function aligned(curves) {
  const at = curves.map(({ x, y }) => new Map(x.map((one, i) => [one, y[i]])));
  const xs = [...new Set(curves.flatMap(({ x }) => x))].sort((a, b) => a - b);
  return [xs, ...at.map((points) => xs.map((x) => points.get(x) ?? null))];
}
