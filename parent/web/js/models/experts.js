// Which experts a streamed model is asked for, layer by layer, and which of them are in memory.

import { html, useEffect, useRef, useState } from "../lib.js";
import { call } from "../core/api.js";
import { count } from "../core/format.js";
import { Dialog } from "../parts/dialog.js";
import { colour } from "../parts/plot.js";

const REFRESH_MS = 2000;
// A cell is a pixel or a few: 75 layers of 256 experts are to be seen at once.
const WIDTH_PX = 512;
const ROW_PX = 5;

export function Experts({ model, onClose }) {
  const [layers, setLayers] = useState(null);
  const [fault, setFault] = useState("");
  useEffect(() => {
    let gone = false;
    let timer;
    const look = async () => {
      try {
        const answer = await call("GET", `api/models/${model.split("/").map(encodeURIComponent).join("/")}/experts`);
        if (!gone) {
          setLayers(answer.layers);
          setFault("");
        }
      } catch (err) {
        if (!gone) setFault(err.message);
      }
      if (!gone) timer = setTimeout(look, REFRESH_MS);
    };
    look();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [model]);
  return html`<${Dialog} title="Experts of ${model}" onClose=${onClose}>
    ${layers && html`<${HeatMap} layers=${layers} />`}
    <p class="fault" role="alert">${fault}</p>
    <div class="dialog-actions"><button type="button" class="button" onClick=${onClose}>Close</button></div>
  <//>`;
}

function HeatMap({ layers }) {
  const canvas = useRef(null);
  const experts = Math.max(...layers.map((layer) => layer.counts.length));
  const held = layers.reduce((sum, layer) => sum + layer.resident.length, 0);
  const all = layers.reduce((sum, layer) => sum + layer.counts.length, 0);
  useEffect(() => draw(canvas.current, layers, experts), [layers]);
  return html`<p class="faint">A line is a layer, a place in it an expert: the stronger, the more often it was asked for of late.
      In colour are those that are in memory, ${count(held)} of ${count(all)}.</p>
    <canvas class="heat" ref=${canvas} width=${WIDTH_PX} height=${layers.length * ROW_PX} role="img"
      aria-label="${layers.length} layers of experts; ${held} of ${all} are in memory"></canvas>`;
}

function draw(canvas, layers, experts) {
  const context = canvas.getContext("2d");
  const [resident, other] = [colour("--accent"), colour("--text-faint")];
  const cell = WIDTH_PX / experts;
  context.clearRect(0, 0, canvas.width, canvas.height);
  layers.forEach((layer, row) => {
    const most = Math.log1p(Math.max(...layer.counts));
    const held = new Set(layer.resident);
    layer.counts.forEach((asked, expert) => {
      context.fillStyle = held.has(expert) ? resident : other;
      // What is held is seen even where nobody has asked for it yet.
      context.globalAlpha = Math.max(held.has(expert) ? 0.25 : 0.05, most > 0 ? Math.log1p(asked) / most : 0);
      context.fillRect(expert * cell, row * ROW_PX, Math.max(cell - 0.5, 0.5), ROW_PX - 1);
    });
  });
}
