// Starts the page: connects, then draws the page that the address names.

import { html, render, useEffect, useRef } from "./lib.js";
import { needsKey } from "./core/api.js";
import { start } from "./core/live.js";
import { route } from "./core/router.js";
import { ChatPage } from "./chat/page.js";
import { LogsPage } from "./logs/page.js";
import { ModelsPage } from "./models/page.js";
import { Confirmation } from "./parts/dialog.js";
import { Login } from "./parts/login.js";
import { Shell } from "./parts/shell.js";
import { Toasts } from "./parts/toasts.js";
import { PoolPage } from "./pool/page.js";

const VIEWS = { pool: PoolPage, models: ModelsPage, chat: ChatPage, logs: LogsPage };

function App() {
  const { page } = route.value;
  const first = useRef(true);
  useEffect(() => {
    // Not on arrival: the browser's own start of reading is the top of the page.
    if (first.current) first.current = false;
    else if (!document.activeElement?.closest("main")) document.querySelector("main h1")?.focus();
  }, [page]);
  if (needsKey.value) return html`<${Login} /><${Toasts} />`;
  return html`<${Shell}><${VIEWS[page]} /><//><${Confirmation} /><${Toasts} />`;
}

start();
render(html`<${App} />`, document.getElementById("app"));
performance.mark("interactive");
