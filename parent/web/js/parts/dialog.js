// Dialogs on the browser's own <dialog>: it keeps the focus inside, closes on Escape, and gives the focus back.

import { html, signal, useEffect, useId, useRef } from "../lib.js";

/** A modal dialog, open as long as it is rendered. onClose: the user wants it gone. */
export function Dialog({ title, onClose, children, class: name = "", role }) {
  const ref = useRef(null);
  const id = useId();
  useEffect(() => {
    const dialog = ref.current;
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close();
      // The element that opened it may be gone, with the thing it acted on.
      if (before?.isConnected) before.focus();
      else document.querySelector("main h1")?.focus();
    };
  }, []);
  // A press on the backdrop reaches the dialog itself, one inside reaches something in it.
  const onPress = (event) => {
    if (event.target === ref.current) onClose();
  };
  const onCancel = (event) => {
    event.preventDefault();
    onClose();
  };
  return html`<dialog ref=${ref} class="dialog ${name}" role=${role} aria-labelledby=${id} onMouseDown=${onPress} onCancel=${onCancel}>
    <div class="dialog-body">
      <h2 id=${id}>${title}</h2>
      ${children}
    </div>
  </dialog>`;
}

/** The question that is being asked; null for none. */
const question = signal(null);

/** Ask before something that can't be undone. keep: the word for not doing it. Resolves to true or false. */
export function confirm({ title, text, action, keep = "Cancel" }) {
  return new Promise((resolve) => {
    question.value = { title, text, action, keep, resolve };
  });
}

/** Shows what `confirm` asks. Render it once. */
export function Confirmation() {
  const asked = question.value;
  if (!asked) return null;
  const answer = (yes) => {
    question.value = null;
    asked.resolve(yes);
  };
  return html`<${Dialog} title=${asked.title} role="alertdialog" class="small" onClose=${() => answer(false)}>
    <p class="dialog-text">${asked.text}</p>
    <div class="dialog-actions">
      <button type="button" class="button" onClick=${() => answer(false)}>${asked.keep}</button>
      <button type="button" class="button danger" onClick=${() => answer(true)}>${asked.action}</button>
    </div>
  <//>`;
}
