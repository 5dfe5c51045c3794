// What a model would take, item by item, and how that changes with the context.

import { html, useEffect, useState } from "../lib.js";
import { call } from "../core/api.js";
import { bytes, count } from "../core/format.js";
import { Dialog } from "../parts/dialog.js";

const ITEMS = [
  ["weights_bytes", "Weights"],
  ["kv_pool_bytes", "KV at this context"],
  ["prefill_bytes", "Prefill"],
  ["allocator_bytes", "Buffers kept"],
  ["overhead_bytes", "Process"],
  ["grammar_bytes", "Grammars"],
];
// Typing a number should ask once, for the whole number.
const SETTLE_MS = 250;

export function Fit({ model, onClose }) {
  const [context, setContext] = useState("");
  const [plan, setPlan] = useState(model.plan);
  const [fault, setFault] = useState("");
  useEffect(() => {
    if (context === "") {
      setPlan(model.plan);
      setFault("");
      return undefined;
    }
    if (!/^[1-9]\d*$/.test(context)) {
      setFault("Use a whole number of tokens.");
      return undefined;
    }
    let gone = false;
    const timer = setTimeout(async () => {
      try {
        const answer = await call("GET", `api/fit?model=${encodeURIComponent(model.name)}&context=${context}`);
        if (!gone) {
          setPlan(answer.plan ?? answer);
          setFault("");
        }
      } catch (err) {
        if (!gone) setFault(err.message);
      }
    }, SETTLE_MS);
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, [context]);

  const fits = plan.verdict !== "does_not_fit";
  return html`<${Dialog} title="Memory of ${model.name}" onClose=${onClose}>
    <table class="plan"><tbody>
      ${ITEMS.map(([key, word]) => html`<tr key=${key}><th scope="row">${word}</th><td>${bytes(plan[key])}</td></tr>`)}
      <tr class="sum"><th scope="row">Reserved</th><td>${bytes(plan.planned_bytes)}</td></tr>
      ${plan.limit_bytes !== null && html`<tr><th scope="row">Budget for models</th><td>${bytes(plan.limit_bytes)}</td></tr>`}
    </tbody></table>
    <p role="status" class=${fits ? "good" : "bad"}>${fits
      ? `Fits, with a context of ${count(plan.context)} tokens.`
      : `Too large by ${bytes(plan.short_by_bytes)}.${plan.fitting_context ? ` A context of ${count(plan.fitting_context)} tokens would fit.` : ""}`}</p>
    <label class="field"><span>With another context, tokens</span>
      <input class="input" inputmode="numeric" placeholder=${String(model.plan.context)} value=${context} onInput=${(event) => setContext(event.target.value.trim())} /></label>
    <p class="fault" role="alert">${fault}</p>
    <div class="dialog-actions"><button type="button" class="button" onClick=${onClose}>Close</button></div>
  <//>`;
}
