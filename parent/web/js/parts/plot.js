// Charts by uPlot, which is fetched when the first one is shown, in the colours of the theme in effect.

import { useEffect, useRef } from "../lib.js";
import { styles } from "../core/styles.js";
import { theme } from "../core/theme.js";

/** A colour of the stylesheet as the canvas understands it: resolved, for the theme in effect. */
export function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const resolved = getComputedStyle(probe).color;
  probe.remove();
  return resolved;
}

/**
 * [box, plot]: refs of the element to draw in, and of the plot once it is there. options(width): of the
 * plot, asked again when the theme changes or one of `again` does. data(): what to draw then; what comes later is
 * given to `plot.current.setData`.
 */
export function usePlot(options, data, again = []) {
  const box = useRef(null);
  const plot = useRef(null);
  const latest = useRef(null);
  latest.current = { options, data };
  useEffect(() => {
    let gone = false;
    let resize;
    const dark = matchMedia("(prefers-color-scheme: dark)");
    let redraw = () => {};
    const plotter = [import("../../vendor/uplot-1.6.32/uplot.js"), styles("vendor/uplot-1.6.32/uplot.css")];
    Promise.all(plotter).then(([{ default: UPlot }]) => {
      if (gone || !box.current) return;
      redraw = () => {
        plot.current?.destroy();
        plot.current = new UPlot(latest.current.options(box.current.clientWidth), latest.current.data(), box.current);
      };
      redraw();
      dark.addEventListener("change", redraw);
      resize = new ResizeObserver(([entry]) => plot.current?.setSize({ width: Math.floor(entry.contentRect.width), height: plot.current.height }));
      resize.observe(box.current);
    }, () => {}); // the figures beside the chart stand without it
    return () => {
      gone = true;
      dark.removeEventListener("change", redraw);
      resize?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [theme.value, ...again]);
  return [box, plot];
}
