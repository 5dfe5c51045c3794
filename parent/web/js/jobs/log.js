// The lines of a job's log, the last ones of them, as they come.

import { html, useEffect, useState } from "../lib.js";
import { copyText } from "../core/actions.js";
import { count, plural } from "../core/format.js";
import { styles } from "../core/styles.js";
import { Empty } from "../parts/bits.js";
import { Icon } from "../parts/icons.js";
import { Lines } from "../parts/lines.js";

export function JobLog({ seen, id, active }) {
  const [follows, setFollows] = useState(true);
  useEffect(() => {
    styles("css/logs.css").catch(() => {});
  }, []);
  const { lines } = seen;
  const isCut = seen.lineCount > lines.length;
  return html`<section class="panel job-log" aria-labelledby="job-log">
    <div class="budget-head">
      <h2 id="job-log" class="section-title">Log</h2>
      <div class="job-actions">
        ${active && html`<button type="button" class="button small" aria-pressed=${follows} onClick=${() => setFollows(!follows)}>Follow</button>`}
        <button type="button" class="button small" disabled=${lines.length === 0} onClick=${() => copyText(lines.map((line) => line.text).join("\n"), `${plural(lines.length, "line")} copied`)}><${Icon} name="copy" />Copy</button>
      </div>
    </div>
    <${Lines} lines=${lines} wrap=${true} paused=${!follows} label="Log of the job" onFollows=${setFollows}>
      <${Empty} title="It has said nothing yet" />
    <//>
    <p class="faint log-count">${isCut ? html`The last ${count(lines.length)} of ${count(seen.lineCount)} lines; all of them: <code>mlxpool jobs logs ${id}</code>` : plural(lines.length, "line")}</p>
  </section>`;
}
