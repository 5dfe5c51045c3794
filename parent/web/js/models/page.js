// The models of this machine: which there are, which fit, and how to get and remove one.

import { html, useEffect, useState } from "../lib.js";
import { bytes } from "../core/format.js";
import { Empty, Waiting } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { Heading } from "../parts/shell.js";
import { follow, library, libraryFault, refresh } from "./library.js";
import { ModelRow } from "./model_row.js";
import { Pull } from "./pull.js";

export function ModelsPage() {
  const [text, setText] = useState("");
  useEffect(follow, []);
  const body = library.value;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = (body?.models ?? []).filter((model) =>
    words.every((word) => `${model.name} ${model.model_type}`.toLowerCase().includes(word)),
  );
  const size = (body?.models ?? []).reduce((sum, model) => sum + model.size_bytes, 0);
  return html`<div class="page">
    <div class="page-head">
      <${Heading}>Models<//>
      ${body && html`<p class="faint">${bytes(size)} in ${body.models.length} · ${bytes(body.disk_free_bytes)} free on disk</p>`}
    </div>
    <${Pull} />
    <section class="panel" aria-labelledby="library-title">
      <div class="budget-head">
        <h2 id="library-title" class="section-title">Library <span class="count">${body ? found.length : ""}</span></h2>
        <label class="search"><span class="visually-hidden">Search the library</span><${Icon} name="search" />
          <input class="input" type="search" placeholder="Search" value=${text} spellcheck=${false} onInput=${(event) => setText(event.target.value)} /></label>
      </div>
      ${libraryFault.value && html`<div class="message-error" role="alert"><p>The library can't be shown: ${libraryFault.value}</p>
        <button type="button" class="button small" onClick=${refresh}>Try again</button></div>`}
      ${body === null && !libraryFault.value && html`<${Waiting} label="Reading the library" />`}
      ${body && body.models.length === 0 && html`<${Empty} title="There are no models here yet"><p>Pull one above, or put a folder with an MLX model into the home's <code>models</code> folder.</p><//>`}
      ${body && body.models.length > 0 && found.length === 0 && html`<${Empty} title="No model matches “${text}”"><button type="button" class="button" onClick=${() => setText("")}>Show all</button><//>`}
      ${found.length > 0 && html`<ul class="library">${found.map((model) => html`<${ModelRow} key=${model.name} model=${model} />`)}</ul>`}
      ${body && Object.keys(body.shadowed ?? {}).length > 0 && html`<${Shadowed} shadowed=${body.shadowed} />`}
    </section>
  </div>`;
}

function Shadowed({ shadowed }) {
  return html`<details class="more"><summary>${Object.keys(shadowed).length} names are taken twice</summary>
    <p class="faint">These folders can't be reached, because a model found earlier has their name:</p>
    <ul>${Object.values(shadowed).flat().map((path) => html`<li key=${path}><code>${path}</code></li>`)}</ul></details>`;
}
