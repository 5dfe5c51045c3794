// What the workers write: one model's log or all of them, as it is written.

import { html, useEffect, useMemo, useState } from "../lib.js";
import { clearLines } from "../core/log_lines.js";
import { connection, logsWanted } from "../core/live.js";
import { go, route } from "../core/router.js";
import { logs, models } from "../core/state.js";
import { count } from "../core/format.js";
import { Empty } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { Lines } from "../parts/lines.js";
import { Heading } from "../parts/shell.js";

const ALL = "*";

/** The lines of one model, or of all in the order they came. */
function linesOf(name) {
  if (name !== ALL) return logs.value.get(name) ?? [];
  return [...logs.value.values()].flat().sort((a, b) => a.n - b.n);
}

export function LogsPage() {
  const name = route.value.rest || ALL;
  const [text, setText] = useState("");
  const [held, setHeld] = useState(null);
  const [wrap, setWrap] = useState(true);

  useEffect(() => {
    setHeld(null);
    logsWanted.value = name;
    return () => {
      logsWanted.value = null;
    };
  }, [name]);

  const live = linesOf(name);
  const lines = held ?? live;
  const wanted = text.toLowerCase();
  const found = useMemo(() => (wanted ? lines.filter((line) => line.text.toLowerCase().includes(wanted)) : lines), [lines, wanted]);
  const names = [...new Set([...(models.value ?? []).map((model) => model.id), ...logs.value.keys()])].sort();
  const missed = held === null ? 0 : live.filter((line) => line.n > (held.at(-1)?.n ?? 0)).length;

  return html`<div class="page logs">
    <div class="page-head">
      <${Heading}>Logs<//>
      <div class="log-tools">
        <label><span class="visually-hidden">Model</span>
          <select class="input" value=${name} onChange=${(event) => go("logs", event.target.value === ALL ? "" : event.target.value)}>
            <option value=${ALL} selected=${name === ALL}>All models</option>
            ${names.map((one) => html`<option key=${one} value=${one} selected=${one === name}>${one}</option>`)}
          </select></label>
        <label class="search"><span class="visually-hidden">Filter the lines</span><${Icon} name="search" />
          <input class="input" type="search" placeholder="Filter" value=${text} spellcheck=${false} onInput=${(event) => setText(event.target.value)} /></label>
        <button type="button" class="button" aria-pressed=${held !== null} onClick=${() => setHeld(held === null ? live : null)}>
          <${Icon} name=${held === null ? "pause" : "play"} />${held === null ? "Pause" : missed ? `Resume (${count(missed)} new)` : "Resume"}</button>
        <button type="button" class="icon-button" aria-pressed=${wrap} aria-label="Wrap long lines" title="Wrap long lines" onClick=${() => setWrap(!wrap)}><${Icon} name="wrap" /></button>
        <button type="button" class="icon-button" aria-label="Clear the view" title="Clear the view (the file keeps the lines)" onClick=${() => { clearLines(name); setHeld(null); }}><${Icon} name="close" /></button>
      </div>
    </div>
    <${Lines} lines=${found} showModel=${name === ALL} wrap=${wrap} paused=${held !== null}>
      ${lines.length > 0
        ? html`<${Empty} title="No line holds “${text}”"><p>${count(lines.length)} lines are hidden by the filter.</p><//>`
        : html`<${Empty} title=${connection.value.state === "open" ? "Nothing was written yet" : "Not connected"}><p>${name === ALL ? "A worker's log begins when its model is loaded." : `${name} writes here once it is loaded.`}</p><//>`}
    <//>
    <p class="faint log-count">${text ? `${count(found.length)} of ${count(lines.length)} lines` : `${count(lines.length)} lines`}${held !== null ? " · paused" : ""}</p>
  </div>`;
}
