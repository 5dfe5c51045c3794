// The figures of a job: the newest of each, and one chart at a time of how they went.

import { html, useState } from "../lib.js";
import { plural } from "../core/format.js";
import { Chart, TONES } from "./chart.js";
import { aligned, charts } from "./record.js";
import { figure } from "./values.js";

export function Figures({ seen }) {
  const [chosen, setChosen] = useState(null);
  const [isLog, setLog] = useState(false);
  const names = [...seen.series.keys()];
  const offered = charts(names);
  const shown = offered.find((one) => one.name === chosen) ?? offered[0];
  const curves = shown.of.map((name) => ({ name, ...seen.series.get(name) }));
  const canLog = curves.every(({ y }) => y.every((value) => value > 0));
  const by = seen.stepName ?? "report";
  return html`<section class="panel" aria-labelledby="job-figures">
    <div class="budget-head">
      <h2 id="job-figures" class="section-title">Figures</h2>
      <div class="job-actions">
        ${offered.length > 1 && html`<label><span class="visually-hidden">Chart</span>
          <select class="input" value=${shown.name} onChange=${(event) => setChosen(event.target.value)}>
            ${offered.map(({ name }) => html`<option key=${name} value=${name} selected=${name === shown.name}>${inText(name)}</option>`)}
          </select></label>`}
        <button type="button" class="button small" aria-pressed=${isLog && canLog} disabled=${!canLog} title=${canLog ? "" : "Only figures above 0 have one"} onClick=${() => setLog(!isLog)}>Log scale</button>
      </div>
    </div>
    <${Chart} curves=${curves} data=${aligned(curves)} isLog=${isLog && canLog} label="${inText(shown.name)} by ${by}: ${curves.map(inWords).join("; ")}" />
    <ul class="legend" aria-label="Curves">${curves.map((curve, i) => html`<li key=${curve.name}>
      <span class="swatch tone-${TONES[i % TONES.length]}" aria-hidden="true"></span><span class="legend-name">${inText(curve.name)}</span>
      <span class="faint">${plural(curve.count, "point")}, last ${figure(curve.y.at(-1))} at ${by} ${figure(curve.x.at(-1))}</span></li>`)}</ul>
    <dl class="figures job-newest">${names.map((name) => html`<div key=${name}><dt>${inText(name)}</dt><dd>${figure(seen.series.get(name).y.at(-1))}</dd></div>`)}</dl>
  </section>`;
}

function inText(name) {
  return name.replaceAll("_", " ");
}

function inWords({ name, count, y }) {
  return `${inText(name)}, ${plural(count, "point")}, from ${figure(y[0])} to ${figure(y.at(-1))}`;
}
