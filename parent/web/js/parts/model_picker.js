// Choose a model: a search field over a list, all by keyboard. Used to load, to switch, and to choose whom to ask.

import { html, useEffect, useId, useRef, useState } from "../lib.js";
import { bytes } from "../core/format.js";
import { models, pool, stateOf } from "../core/state.js";
import { StateBadge, Waiting } from "./bits.js";
import { Dialog } from "./dialog.js";

/** Loaded models first, then by name. */
function ordered(list, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return list
    .filter((model) => words.every((word) => model.id.toLowerCase().includes(word)))
    .sort((a, b) => (stateOf(b.id) === "ready") - (stateOf(a.id) === "ready") || a.id.localeCompare(b.id));
}

/** More than the whole budget: no eviction makes room for it. */
function isTooLarge(model) {
  return pool.value !== null && model.planned_bytes > pool.value.budget_bytes;
}

/** title: what it is for. offered: (model) → whether to list it. onPick(name), onClose(). */
export function ModelPicker({ title, offered = () => true, current, onPick, onClose }) {
  const [text, setText] = useState("");
  const [at, setAt] = useState(null);
  const list = useRef(null);
  const id = useId();
  const found = models.value === null ? null : ordered(models.value.filter(offered), text);
  // Until an arrow key says otherwise, the one in use is chosen, and while one searches the first found.
  const start = text ? 0 : Math.max(0, found?.findIndex((model) => model.id === current) ?? 0);
  const chosen = Math.min(at ?? start, (found?.length ?? 1) - 1);

  useEffect(() => {
    list.current?.querySelector('[aria-selected="true"]')?.scrollIntoView({ block: "nearest" });
  }, [chosen, text]);

  const pick = (model) => {
    onClose();
    onPick(model.id);
  };
  const onKeyDown = (event) => {
    const last = (found?.length ?? 0) - 1;
    const moves = { ArrowDown: Math.min(chosen + 1, last), ArrowUp: Math.max(chosen - 1, 0), Home: 0, End: last };
    if (event.key in moves) {
      event.preventDefault();
      setAt(moves[event.key]);
    } else if (event.key === "Enter" && found?.[chosen]) {
      event.preventDefault();
      pick(found[chosen]);
    }
  };

  return html`<${Dialog} title=${title} class="picker" onClose=${onClose}>
    <input class="input" type="text" role="combobox" aria-label="Search models" placeholder="Search models"
      aria-expanded="true" aria-controls=${id} aria-activedescendant=${found?.length ? `${id}-${chosen}` : undefined}
      autocomplete="off" spellcheck=${false} value=${text} onKeyDown=${onKeyDown}
      onInput=${(event) => { setText(event.target.value); setAt(null); }} />
    <ul class="options" id=${id} role="listbox" aria-label="Models" ref=${list}>
      ${found?.map((model, i) => html`<li key=${model.id} id="${id}-${i}" role="option" class="option" aria-selected=${i === chosen}
          onClick=${() => pick(model)} onMouseMove=${() => i !== chosen && setAt(i)}>
        <span class="option-name">${model.id}${model.id === current && html` <span class="faint">current</span>`}</span>
        <span class="option-side">
          ${model.planned_bytes !== null && html`<span class=${isTooLarge(model) ? "bad" : "faint"}>${bytes(model.planned_bytes)}${isTooLarge(model) ? ", too large" : ""}</span>`}
          <${StateBadge} state=${stateOf(model.id)} />
        </span>
      </li>`)}
    </ul>
    ${found === null && html`<${Waiting} label="Loading the list of models" />`}
    ${found?.length === 0 && html`<p class="faint pad">${text ? `No model here matches “${text}”.` : "There is no other model here."}</p>`}
  <//>`;
}
