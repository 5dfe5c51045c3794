// What is kept of prompts: how full memory and disk are, and how much reading that saves.

import { html, useState } from "../lib.js";
import { flushPrompts } from "../core/actions.js";
import { bytes, count, percent, span } from "../core/format.js";

/** The part of prompts of which a beginning was cached; null before the first prompt. */
export function hitRate({ hits, misses }) {
  return hits + misses === 0 ? null : hits / (hits + misses);
}

export function Prompts({ cache }) {
  const [flushing, setFlushing] = useState(false);
  const flush = async () => {
    setFlushing(true);
    await flushPrompts();
    setFlushing(false);
  };
  if (cache.max_bytes === 0 && !cache.ssd) {
    return html`<section class="panel" aria-labelledby="prompts-title">
      <h2 id="prompts-title" class="section-title">Prompt cache</h2>
      <p class="quiet">Off: every prompt is read from its start.</p>
    </section>`;
  }
  const rate = hitRate(cache);
  return html`<section class="panel prompts" aria-labelledby="prompts-title">
    <div class="budget-head">
      <h2 id="prompts-title" class="section-title">Prompt cache</h2>
      ${cache.ssd && html`<button type="button" class="button small" disabled=${flushing} title="Write what is not on disk yet" onClick=${flush}>${flushing ? "Flushing…" : "Flush"}</button>`}
    </div>
    <div class="tiers">
      <${Tier} name="Memory" held=${cache.bytes} limit=${cache.max_bytes} />
      ${cache.ssd ? html`<${Tier} name="Disk" held=${cache.ssd_bytes} limit=${cache.ssd_max_bytes} />` : html`<p class="faint">Nothing is kept on disk.</p>`}
    </div>
    ${cache.off !== null && html`<p class="strip-note" role="alert">Writing is off: ${cache.off}</p>`}
    <dl class="figures">
      <div class="figure-main"><dt>hit rate</dt><dd>${rate === null ? "–" : percent(rate)}</dd></div>
      <div><dt>tokens reused</dt><dd>${count(cache.cached_tokens)}</dd></div>
      ${cache.ssd && html`<div><dt>to be written</dt><dd>${count(cache.pending)}</dd></div>
      <div><dt>last restore</dt><dd>${cache.restores > 0 ? span(cache.restore_ms_last / 1000) : "–"}</dd></div>`}
      ${cache.losses > 0 && html`<div class="warn"><dt>drains with losses</dt><dd>${count(cache.losses)} of ${count(cache.drains)}</dd></div>`}
    </dl>
  </section>`;
}

function Tier({ name, held, limit }) {
  const share = limit > 0 ? Math.min(1, held / limit) : 0;
  return html`<div class="tier">
    <p class="card-memory"><span class="faint">${name}</span><span>${bytes(held)} of ${bytes(limit)}</span></p>
    <div class="meter" role="meter" aria-label="${name} of the prompt cache" aria-valuemin="0" aria-valuemax="100" aria-valuenow=${Math.floor(share * 100)} aria-valuetext="${bytes(held)} of ${bytes(limit)}">
      <div style=${{ transform: `scaleX(${share})` }}></div>
    </div>
  </div>`;
}
