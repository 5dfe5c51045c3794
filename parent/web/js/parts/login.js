// Asks for the API key, in place of the page, whenever the server has said 401.

import { html, useEffect, useRef, useState } from "../lib.js";
import { apiKey, call, needsKey, useKey } from "../core/api.js";

export function Login() {
  const [fault, setFault] = useState(apiKey.value ? "The server no longer accepts the key that was kept." : "");
  const [busy, setBusy] = useState(false);
  const field = useRef(null);
  useEffect(() => {
    document.title = "Sign in · mlxpool";
    field.current.focus();
  }, []);

  const submit = async (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    if (!key) {
      setFault("Enter one of the keys in [server] api_keys.");
      field.current.focus();
      return;
    }
    setBusy(true);
    const before = apiKey.value;
    apiKey.value = key;
    try {
      await call("GET", "api/pool");
      useKey(key, event.target.elements.remember.checked);
      needsKey.value = false;
    } catch (err) {
      apiKey.value = before;
      setFault(err.status === 401 ? "That is not one of this server's keys." : err.message);
      setBusy(false);
      field.current.select();
    }
  };

  return html`<main class="login">
    <form onSubmit=${submit} novalidate>
      <p class="brand"><span class="mark" aria-hidden="true"></span>mlxpool</p>
      <h1>Sign in</h1>
      <p class="faint">This server asks for an API key: one of <code>[server] api_keys</code> in its config.</p>
      <label class="field"><span>API key</span>
        <input class="input" ref=${field} type="password" name="key" autocomplete="current-password" spellcheck=${false}
          aria-invalid=${fault ? "true" : undefined} aria-describedby="login-fault" /></label>
      <p id="login-fault" class="fault" role="alert">${fault}</p>
      <label class="check"><input type="checkbox" name="remember" /> Keep it in this browser</label>
      <button class="button primary wide" disabled=${busy}>${busy ? "Signing in…" : "Sign in"}</button>
    </form>
  </main>`;
}
