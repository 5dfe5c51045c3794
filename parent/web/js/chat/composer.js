// Where a question is written. Enter sends, Shift+Enter makes a line, Escape stops the answer.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../lib.js";
import { Icon } from "../parts/icons.js";

// Where the browser can't grow a field with its text, the page does.
const GROWS = CSS.supports("field-sizing", "content");

/** Put the cursor there: what had the focus may be gone. Not on a phone, where it would raise the keyboard. */
export function focusComposer() {
  if (matchMedia("(hover: hover)").matches) {
    document.querySelector(".composer textarea")?.focus({ preventScroll: true });
  }
}

export function Composer({ run, model, onAsk }) {
  const [text, setText] = useState("");
  const field = useRef(null);
  useEffect(focusComposer, []);
  useLayoutEffect(() => {
    if (GROWS) return;
    field.current.style.height = "auto";
    field.current.style.height = `${field.current.scrollHeight}px`;
  }, [text]);

  const send = () => {
    const said = text.trim();
    if (!said || run || !model) return;
    setText("");
    onAsk(said);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape" && run) {
      run.stop();
    }
  };

  return html`<form class="composer" onSubmit=${(event) => { event.preventDefault(); send(); }}>
    <div class="composer-box">
      <textarea ref=${field} rows="1" aria-label="Message" placeholder=${model ? `Message ${model}` : "No model to ask"} value=${text}
        onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
      ${run
        ? html`<button type="button" class="round" aria-label="Stop" title="Stop (Escape)" onClick=${() => { run.stop(); field.current.focus(); }}><${Icon} name="stop" /></button>`
        : html`<button class="round primary" aria-label="Send" title="Send (Enter)" disabled=${!text.trim() || !model}><${Icon} name="send" /></button>`}
    </div>
  </form>`;
}
