// One model of the library: how large, whether it fits, what can be done with it.

import { html, useState } from "../lib.js";
import { load, pin, unload } from "../core/actions.js";
import { call } from "../core/api.js";
import { bytes, count, percent } from "../core/format.js";
import { linkTo } from "../core/router.js";
import { loadProgress, modelsByName, stateOf, workers } from "../core/state.js";
import { attempt, say } from "../core/toasts.js";
import { Progress, StateBadge } from "../parts/bits.js";
import { confirm } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";
import { Experts } from "./experts.js";
import { Fit } from "./fit.js";
import { refresh } from "./library.js";

const VERDICTS = { fits: "fits", fits_with_context: "fits, shorter context", does_not_fit: "too large" };
const IS_IDLE = new Set(["absent", "failed"]);

export function ModelRow({ model }) {
  const [fitting, setFitting] = useState(false);
  const [mapping, setMapping] = useState(false);
  const state = stateOf(model.name);
  const worker = workers.value.get(model.name);
  const pinned = worker?.pinned ?? modelsByName.value.get(model.name)?.pinned ?? false;
  const share = state === "loading" ? loadProgress(worker) : null;
  const streams = state === "ready" && modelsByName.value.get(model.name)?.capabilities?.streamed_experts;
  const isComing = state === "starting" || state === "loading";
  const reason = state === "failed" ? (worker?.reason ?? modelsByName.value.get(model.name)?.reason) : null;
  const canLoad = !model.fault && model.verdict !== "does_not_fit";
  const detail = [model.model_type, `${bytes(model.size_bytes)} on disk`, model.plan && `context ${count(model.plan.context)}`].filter(Boolean);
  return html`<li class="library-row" aria-label=${model.name}>
    <div class="library-main">
      <h3 class="library-name">${model.name}${pinned && html`<span class="pinned" title="Pinned: never evicted"><${Icon} name="pin" /><span class="visually-hidden">pinned</span></span>`}</h3>
      <p class="faint">${detail.join(" · ")}</p>
      ${(model.fault || reason) && html`<p class="bad">${model.fault || reason}</p>`}
      ${state === "loading" && html`<${Progress} value=${share} label="Loading ${model.name}" />`}
    </div>
    <div class="library-fit">
      ${model.plan
        ? html`<button type="button" class="verdict ${model.verdict}" title=${model.explanation} onClick=${() => setFitting(true)}>
            <span class="visually-hidden">Memory of ${model.name}:</span> <strong>${bytes(model.plan.planned_bytes)}</strong> <span class="word">${VERDICTS[model.verdict]}</span></button>`
        : html`<span class="verdict does_not_fit"><span class="word">can't be loaded</span></span>`}
    </div>
    <div class="library-state"><${StateBadge} state=${state} />${share !== null && html`<span class="faint">${percent(share)}</span>`}</div>
    <div class="library-actions">
      ${IS_IDLE.has(state)
        ? html`<button type="button" class="button small" disabled=${!canLoad} onClick=${() => load(model.name)} aria-label="Load ${model.name}">Load</button>`
        : html`<button type="button" class="button small" disabled=${state === "draining" || state === "stopping"} onClick=${() => unload(model.name)} aria-label="${isComing ? "Cancel loading" : "Unload"} ${model.name}">${isComing ? "Cancel" : "Unload"}</button>`}
      ${streams && html`<button type="button" class="button small" onClick=${() => setMapping(true)} aria-label="Experts of ${model.name}">Experts</button>`}
      <a class="button small" href="${linkTo("chat")}?model=${encodeURIComponent(model.name)}" aria-label="Chat with ${model.name}">Chat</a>
      <button type="button" class="icon-button" aria-pressed=${pinned} aria-label="${pinned ? "Unpin" : "Pin"} ${model.name}" title=${pinned ? "Unpin" : "Pin: never evict"} onClick=${() => pin(model.name, !pinned)}><${Icon} name="pin" /></button>
      <button type="button" class="icon-button" disabled=${!model.removable} aria-label="Remove ${model.name}" title=${model.removable ? "Remove from disk" : "Lies outside mlxpool's own folder: remove it there"} onClick=${() => removeModel(model, state)}><${Icon} name="trash" /></button>
    </div>
    ${mapping && html`<${Experts} model=${model.name} onClose=${() => setMapping(false)} />`}
    ${fitting && html`<${Fit} model=${model} onClose=${() => setFitting(false)} />`}
  </li>`;
}

async function removeModel(model, state) {
  const sure = await confirm({
    title: `Remove ${model.name}?`,
    text: `This deletes ${bytes(model.size_bytes)} from the disk: ${model.path}.${IS_IDLE.has(state) ? "" : " The model is loaded; unload it first."}`,
    action: "Remove",
  });
  if (!sure) return;
  const path = `api/library/${model.name.split("/").map(encodeURIComponent).join("/")}`;
  if (await attempt(() => call("DELETE", path))) {
    say(`${model.name} is removed`);
    await refresh();
  }
}
