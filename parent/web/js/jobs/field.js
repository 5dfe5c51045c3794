// One field of a kind's form, by the sort of value it takes.

import { html, useEffect, useId, useState } from "../lib.js";
import { Icon } from "../parts/icons.js";
import { ModelPicker } from "../parts/model_picker.js";
import { offers } from "./kinds.js";

/** field: as `fieldsOf` has it. fault: why the server refused the value. model: the form's, whose adapters fit. */
export function Field({ field, value, fault, model, onChange }) {
  const id = useId();
  const described = `${id}-help${fault ? ` ${id}-fault` : ""}`;
  const common = { id, name: field.name, "aria-describedby": described, "aria-invalid": fault ? "true" : undefined, "aria-required": field.required ? "true" : undefined };
  const unsaid = field.required || isGiven(field) ? "" : field.hint.fallback ? `${field.hint.fallback} if left empty` : "may be left empty";
  const notes = [field.help, field.hint.range, unsaid].filter(Boolean);
  const isChoice = field.kind === "choice" || field.kind === "choice-flag";
  if (field.kind === "flag") {
    return html`<div class="job-field">
      <label class="check"><input type="checkbox" ...${common} checked=${value} onChange=${(event) => onChange(event.target.checked)} /> ${field.label}</label>
      <${Notes} id=${id} notes=${notes} fault=${fault} /></div>`;
  }
  return html`<div class="job-field">
    <label for=${id}>${field.label}</label>
    ${isChoice
      ? html`<${Choice} field=${field} common=${common} value=${value} onChange=${onChange} />`
      : html`<${Text} field=${field} common=${common} value=${value} model=${model} onChange=${onChange} />`}
    <${Notes} id=${id} notes=${notes} fault=${fault} /></div>`;
}

function Notes({ id, notes, fault }) {
  return html`<p id="${id}-help" class="faint job-help">${notes.join(" · ")}</p>
    ${fault && html`<p id="${id}-fault" class="fault">${fault}</p>`}`;
}

/** Whether it has a value at any time, typed or not. */
function isGiven(field) {
  return field.kind === "flag" || (field.kind === "choice" && field.fallback !== null);
}

function Choice({ field, common, value, onChange }) {
  const choices = field.kind === "choice" ? field.choices.map(String) : ["true", "false"];
  const words = field.kind === "choice" ? choices.map((one) => (one === String(field.fallback) ? `${one} (default)` : one)) : ["yes", "no"];
  return html`<select class="input" ...${common} value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${!isGiven(field) && html`<option value="" selected=${value === ""}>${field.required ? "Choose…" : "not set"}</option>`}
    ${choices.map((one, i) => html`<option key=${one} value=${one} selected=${one === value}>${words[i]}</option>`)}
  </select>`;
}

const PLACEHOLDERS = { file: "/path/on/the/server's/machine", dataset: "a dataset's name, or a file's path" };

function Text({ field, common, value, model, onChange }) {
  const [picking, setPicking] = useState(false);
  const [offered, setOffered] = useState([]);
  const ofModel = field.source === "adapter" ? model : "";
  useEffect(() => {
    let gone = false;
    if (field.source === "adapter" || field.source === "dataset") offers(field.source, ofModel).then((names) => gone || setOffered(names));
    return () => {
      gone = true;
    };
  }, [field.source, ofModel]);
  const list = offered.length > 0 ? `${common.id}-list` : undefined;
  if (field.isLong) return html`<textarea class="input" rows="4" ...${common} value=${value} onInput=${(event) => onChange(event.target.value)}></textarea>`;
  const input = html`<input class="input" type="text" ...${common} value=${value} list=${list} autocomplete="off" autocapitalize="off" spellcheck=${false}
    inputmode=${field.kind === "number" ? "decimal" : undefined} placeholder=${field.hint.fallback || PLACEHOLDERS[field.source] || undefined}
    onInput=${(event) => onChange(event.target.value)} />`;
  return html`${field.source === "model"
      ? html`<div class="job-pick">${input}<button type="button" class="button" onClick=${() => setPicking(true)} aria-label="Choose: ${field.label}"><${Icon} name="search" />Choose</button></div>`
      : input}
    ${list && html`<datalist id=${list}>${offered.map((name) => html`<option key=${name} value=${name}></option>`)}</datalist>`}
    ${picking && html`<${ModelPicker} title="Choose: ${field.label}" current=${value} onPick=${onChange} onClose=${() => setPicking(false)} />`}`;
}
