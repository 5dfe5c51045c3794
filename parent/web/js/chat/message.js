// One message: what was said, how the answer came about, and what can be done with it.

import { html, useLayoutEffect, useRef, useState } from "../lib.js";
import { copyText } from "../core/actions.js";
import { count, percent, plural, rate, span } from "../core/format.js";
import { useNow } from "../core/now.js";
import { loadProgress, pool, workers } from "../core/state.js";
import { Markdown } from "../markdown/view.js";
import { Progress } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";

export function Message({ message, busy, isLast, editing, onEdit, onCancel, onEdited, onRetry }) {
  if (message.role === "user") {
    return html`<li class="message user">
      <h2 class="visually-hidden">You</h2>
      ${editing
        ? html`<${Editor} text=${message.content} onCancel=${onCancel} onDone=${onEdited} />`
        : html`<div class="bubble">${message.content}</div>
          <div class="message-tools"><${Tool} icon="copy" label="Copy message" onClick=${() => copyText(message.content)} />
            <${Tool} icon="edit" label="Edit message" disabled=${busy} onClick=${onEdit} /></div>`}
    </li>`;
  }
  return html`<li class="message assistant">
    <h2 class="message-who">${message.model}</h2>
    ${message.reasoning && html`<${Reasoning} text=${message.reasoning} />`}
    ${message.content && html`<${Markdown} text=${message.content} />`}
    ${message.error && html`<div class="message-error"><p>${message.error}</p></div>`}
    ${!message.content && !message.error && html`<p class="faint">${message.stopped ? "Stopped before the first word." : "The answer is empty."}</p>`}
    <div class="message-foot">
      <${Figures} message=${message} />
      <div class="message-tools">
        ${message.content && html`<${Tool} icon="copy" label="Copy answer" onClick=${() => copyText(message.content)} />`}
        ${isLast && html`<${Tool} icon="retry" label="Retry" disabled=${busy} onClick=${onRetry} />`}
      </div>
    </div>
  </li>`;
}

/** The answer that is being written, or what it waits for. */
export function RunningAnswer({ run, onGrow }) {
  const { reasoning, answer } = run.shown.value;
  useLayoutEffect(onGrow, [reasoning, answer]);
  return html`<li class="message assistant running" aria-busy="true">
    <h2 class="message-who">${run.model}</h2>
    ${reasoning && html`<${Reasoning} text=${reasoning} live=${!answer} />`}
    ${answer ? html`<${Markdown} text=${answer} />` : !reasoning && html`<${Wait} run=${run} />`}
  </li>`;
}

function Wait({ run }) {
  const nowMs = useNow();
  const worker = workers.value.get(run.model);
  const share = worker?.state === "loading" ? loadProgress(worker) : null;
  const waited = Math.max(0, Math.floor((performance.now() - run.startedAt) / 1000));
  const ticket = pool.value?.queue.find((one) => one.model === run.model);
  let words = "Reading the prompt";
  if (ticket?.waits_for === "lease") words = `Waiting for the GPU: ${ticket.holder}`;
  else if (!worker || worker.state === "starting" || worker.state === "absent") words = "Starting the model";
  else if (worker.state === "loading") words = share === null ? "Loading the model" : `Loading the model, ${percent(share)}`;
  else if (worker.state !== "ready") words = "Waiting for the model";
  else if (ticket && worker.queued > 0) words = "Waiting for a place";
  return html`<div class="message-wait" data-now=${nowMs}>
    <p class="faint">${words}${waited >= 2 ? ` · ${span(waited)}` : ""}</p>
    ${worker?.state === "loading" && html`<${Progress} value=${share} label="Loading ${run.model}" />`}
  </div>`;
}

function Reasoning({ text, live = false }) {
  return html`<details class="reasoning"><summary>${live ? "Reasoning…" : "Reasoning"} <span class="faint">${plural(text.split(/\s+/).length, "word")}</span></summary>
    <div class="reasoning-text">${text}</div></details>`;
}

function Figures({ message }) {
  const f = message.figures;
  const parts = [];
  if (f?.tokens_per_s) parts.push(["rate", `${rate(f.tokens_per_s)} tokens/s`]);
  if (f?.tokens != null) parts.push(["tokens", plural(f.tokens, "token")]);
  if (f?.cached_tokens != null) parts.push(["cached", `${count(f.cached_tokens)} of ${count(f.prompt_tokens)} prompt tokens cached`]);
  if (f) parts.push(["first", `first token after ${span(f.first_s)}`]);
  if (message.stopped) parts.push(["end", "stopped"]);
  if (message.cut) parts.push(["end", "cut at the length limit"]);
  return html`<p class="figures-line">${parts.map(([name, text]) => html`<span key=${name} class="figure-${name}">${text}</span>`)}</p>`;
}

function Editor({ text, onDone, onCancel }) {
  const [draft, setDraft] = useState(text);
  const field = useRef(null);
  useLayoutEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(text.length, text.length);
  }, []);
  const done = () => draft.trim() && onDone(draft.trim());
  const onKeyDown = (event) => {
    if (event.key === "Escape") onCancel();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      done();
    }
  };
  return html`<form class="editor" onSubmit=${(event) => { event.preventDefault(); done(); }}>
    <textarea ref=${field} class="input" rows="3" aria-label="Edit message" value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKeyDown}></textarea>
    <div class="dialog-actions"><button type="button" class="button small" onClick=${onCancel}>Cancel</button>
      <button class="button small primary" disabled=${!draft.trim()}>Ask again</button></div>
  </form>`;
}

function Tool({ icon, label, onClick, disabled = false }) {
  return html`<button type="button" class="icon-button" aria-label=${label} title=${label} disabled=${disabled} onClick=${onClick}><${Icon} name=${icon} /></button>`;
}
