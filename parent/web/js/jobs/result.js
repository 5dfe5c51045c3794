// What a job has made, and where to go with it.

import { html } from "../lib.js";
import { copyText, load } from "../core/actions.js";
import { linkTo } from "../core/router.js";
import { modelsByName, stateOf } from "../core/state.js";
import { Icon } from "../parts/icons.js";
import { inWords } from "./values.js";

const MAKES_NO_MODEL = new Set(["evaluate", "finetune", "dataset"]);

/** The model it made, by the name that the library has it under; null where it made none. */
function madeModel(job) {
  if (MAKES_NO_MODEL.has(job.kind)) return null;
  const parts = (job.result.path ?? "").split("/");
  const names = [job.result.name, job.result.model, parts.slice(-2).join("/"), parts.at(-1), job.config.name];
  return names.find((name) => modelsByName.value.has(name)) ?? null;
}

export function Result({ job }) {
  const model = madeModel(job);
  const { adapter } = job.result;
  return html`<section class="panel" aria-labelledby="job-result">
    <h2 id="job-result" class="section-title">Result</h2>
    <dl class="job-facts">${Object.entries(job.result).map(([name, value]) => html`<div key=${name}><dt>${name.replaceAll("_", " ")}</dt><dd>${inWords(value)}</dd></div>`)}</dl>
    ${model && html`<${Model} name=${model} />`}
    ${job.kind === "finetune" && adapter && html`<${Adapter} adapter=${adapter} model=${job.config.model} />`}
    ${job.kind === "dataset" && html`<p class="job-next"><a class="button small" href="${linkTo("jobs", "new/finetune")}?data=${encodeURIComponent(job.result.dataset ?? "")}">Fine-tune with it</a></p>`}
  </section>`;
}

function Model({ name }) {
  const isLoaded = stateOf(name) !== "absent" && stateOf(name) !== "failed";
  return html`<p class="job-next">
    <button type="button" class="button small primary" disabled=${isLoaded} aria-label="Load ${name}" onClick=${() => load(name)}>${isLoaded ? "Loaded" : "Load"}</button>
    <a class="button small" href="${linkTo("chat")}?model=${encodeURIComponent(name)}" aria-label="Chat with ${name}">Chat</a>
    <a class="link" href=${linkTo("models")}>See it under Models</a></p>`;
}

function Adapter({ adapter, model }) {
  const name = `${model}:${adapter}`;
  return html`<p class="job-next">Ask for the model <code>${name}</code>, or for <code>${model}</code> with <code>"adapter": "${adapter}"</code> in the request.</p>
    <p class="job-next">
      <a class="button small primary" href="${linkTo("chat")}?model=${encodeURIComponent(name)}" aria-label="Chat with ${name}">Chat</a>
      <button type="button" class="button small" onClick=${() => copyText(name, "The model's name is copied")}><${Icon} name="copy" />Copy the name</button>
      <a class="button small" href="${linkTo("jobs", "new/fuse")}?model=${encodeURIComponent(model)}&adapter=${encodeURIComponent(adapter)}">Fuse it into a model</a></p>`;
}
