// What goes along with every question of a conversation: a system prompt, temperature, a limit.

import { html, useState } from "../lib.js";
import { Dialog } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";

const MAX_TEMPERATURE = 2;

export function ChatSettings({ settings, onChange }) {
  const [open, setOpen] = useState(false);
  const [fault, setFault] = useState("");
  const submit = (event) => {
    event.preventDefault();
    const { system, temperature, max_tokens: limit } = event.target.elements;
    const heat = temperature.value.trim();
    const most = limit.value.trim();
    if (heat !== "" && !(Number(heat) >= 0 && Number(heat) <= MAX_TEMPERATURE)) {
      setFault(`Temperature is ${heat}; use 0 to ${MAX_TEMPERATURE}, or nothing for the model's own.`);
    } else if (most !== "" && !/^[1-9]\d*$/.test(most)) {
      setFault(`Longest answer is ${most}; use a whole number of tokens, or nothing for no limit.`);
    } else {
      onChange({
        ...(system.value.trim() && { system: system.value }),
        ...(heat !== "" && { temperature: Number(heat) }),
        ...(most !== "" && { max_tokens: Number(most) }),
      });
      setOpen(false);
    }
  };
  const isSet = Object.keys(settings).length > 0;
  return html`<button type="button" class="icon-button ${isSet ? "on" : ""}" aria-haspopup="dialog" aria-label="Chat settings${isSet ? ", changed" : ""}" title="Chat settings" onClick=${() => { setFault(""); setOpen(true); }}><${Icon} name="settings" /></button>
  ${open && html`<${Dialog} title="Chat settings" onClose=${() => setOpen(false)}>
    <form onSubmit=${submit} novalidate>
      <label class="field"><span>System prompt</span><textarea class="input" name="system" rows="4" defaultValue=${settings.system ?? ""}></textarea></label>
      <div class="field-row">
        <label class="field"><span>Temperature</span><input class="input" name="temperature" inputmode="decimal" placeholder="model's own" defaultValue=${settings.temperature ?? ""} /></label>
        <label class="field"><span>Longest answer, tokens</span><input class="input" name="max_tokens" inputmode="numeric" placeholder="no limit" defaultValue=${settings.max_tokens ?? ""} /></label>
      </div>
      <p class="fault" role="alert">${fault}</p>
      <div class="dialog-actions"><button type="button" class="button" onClick=${() => setOpen(false)}>Cancel</button><button class="button primary">Save</button></div>
    </form>
  <//>`}`;
}
