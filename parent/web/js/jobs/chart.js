// Curves of one job over its steps.

import { html, useLayoutEffect } from "../lib.js";
import { colour, usePlot } from "../parts/plot.js";
import { figure } from "./values.js";

/** Colours of the stylesheet, in the order curves take them. */
export const TONES = ["accent", "warn", "bad", "text-faint"];
const HEIGHT_PX = 220;
// With fewer than this a line alone would hide where the points are.
const DOTTED_UNDER = 60;

function options(width, curves, isLog) {
  const axis = { stroke: colour("--text-faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width,
    height: HEIGHT_PX,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { size: 7 } },
    padding: [10, 12, 0, 0],
    scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
    axes: [
      { ...axis, space: 70, size: 24, grid: { show: false }, values: (_, splits) => splits.map((one) => (Number.isInteger(one) ? figure(one) : "")) },
      { ...axis, space: 36, size: 58, values: (_, splits) => splits.map((one) => (one === null ? "" : figure(one))) },
    ],
    series: [
      {},
      ...curves.map(({ name }, i) => ({
        label: name,
        stroke: colour(`--${TONES[i % TONES.length]}`),
        width: 1.5,
        // Curves have their points at steps of their own.
        spanGaps: true,
        points: { show: (plot, at) => plot.data[at].filter((one) => one !== null).length < DOTTED_UNDER, size: 5 },
      })),
    ],
  };
}

/** curves: [{name}], data: as `aligned` has it. label: the chart in words. */
export function Chart({ curves, data, isLog, label }) {
  const shape = `${isLog} ${curves.map(({ name }) => name).join(" ")}`;
  const [box, plot] = usePlot((width) => options(width, curves, isLog), () => data, [shape]);
  useLayoutEffect(() => {
    if (plot.current?.series.length === data.length) plot.current.setData(data);
  });
  return html`<div class="job-plot" ref=${box} role="img" aria-label=${label}></div>`;
}
