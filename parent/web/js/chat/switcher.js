// Whom to ask. Choosing a model loads it, and the button itself shows how far the load is.

import { html, useState } from "../lib.js";
import { load } from "../core/actions.js";
import { percent } from "../core/format.js";
import { IS_UP, loadProgress, stateOf, workers } from "../core/state.js";
import { StateBadge } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { ModelPicker } from "../parts/model_picker.js";

export function Switcher({ model, onChoose }) {
  const [picking, setPicking] = useState(false);
  const state = model ? stateOf(model) : "absent";
  const worker = workers.value.get(model);
  const share = state === "loading" ? loadProgress(worker) : null;
  const pick = (name) => {
    onChoose(name);
    if (!IS_UP.has(stateOf(name))) load(name);
  };
  return html`<button type="button" class="switcher state-${state}" aria-haspopup="dialog" onClick=${() => setPicking(true)}>
    <span class="visually-hidden">Model: </span><span class="switcher-name">${model || "Choose a model"}</span>
    ${state === "loading" || state === "starting"
      ? html`<span class="switcher-load"><span class="visually-hidden">${state} </span>${share === null ? "…" : percent(share)}</span>`
      : model && html`<${StateBadge} state=${state} />`}
    <${Icon} name="down" />
    ${(state === "loading" || state === "starting") && html`<span class="switcher-bar" style=${{ transform: `scaleX(${share ?? 0.02})` }}></span>`}
  </button>
  ${picking && html`<${ModelPicker} title="Choose a model" current=${model} onPick=${pick} onClose=${() => setPicking(false)} />`}`;
}
