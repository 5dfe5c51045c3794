// Tokens per second over the last minutes, drawn by uPlot. All of it is fetched after the page is usable.

import { html, useLayoutEffect } from "../lib.js";
import { minute, rate } from "../core/format.js";
import { useNow } from "../core/now.js";
import { pool, poolAt } from "../core/state.js";
import { colour, usePlot } from "../parts/plot.js";
import { WINDOW_S, points, total } from "./history.js";

const HEIGHT_PX = 120;
// Tokens per second that the axis shows at least: an idle pool has a scale too.
const LEAST_SCALE = 10;

function options(width) {
  const axis = { stroke: colour("--text-faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width,
    height: HEIGHT_PX,
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 4, 0, 0],
    scales: {
      x: { time: true, range: () => [Date.now() / 1000 - WINDOW_S, Date.now() / 1000] },
      y: { range: (_, __, high) => [0, Math.max(LEAST_SCALE, high * 1.15)] },
    },
    axes: [
      { ...axis, space: 90, size: 22, values: (_, splits) => splits.map(minute), grid: { show: false } },
      { ...axis, space: 36, size: 40 },
    ],
    series: [{}, { stroke: colour("--accent"), fill: colour("--accent-wash"), width: 1.5, points: { show: false } }],
  };
}

export function Throughput() {
  const [box, plot] = usePlot(options, () => points.peek());
  const rateNow = total(pool.value);
  // Busy, the window moves with each new point; idle, with the clock, as long as there is something in it to see.
  const moving = rateNow === 0 && points.value[1].some((value) => value > 0);
  const nowMs = useNow(moving, poolAt);

  // In the frame that is drawn anyway: an effect after it would be one more.
  useLayoutEffect(() => {
    plot.current?.setData(points.peek());
  }, [Math.floor(nowMs / 1000), moving]);

  return html`<section class="panel" aria-labelledby="rate-title">
    <div class="budget-head">
      <h2 id="rate-title" class="section-title">Throughput</h2>
      <p class="budget-sum"><strong>${rate(rateNow)}</strong> tokens/s</p>
    </div>
    <div class="plot" ref=${box} role="img" aria-label="Tokens per second over the last three minutes; now ${rate(rateNow)}"></div>
  </section>`;
}
