// Starts the page: connects, then draws the page that the address names.

import { html, render, signal, useEffect, useRef } from "./lib.js";
import { needsKey } from "./core/api.js";
import { start } from "./core/live.js";
import { PAGES, route } from "./core/router.js";
import { styles } from "./core/styles.js";
import { say } from "./core/toasts.js";
import { Confirmation } from "./parts/dialog.js";
import { Shell } from "./parts/shell.js";
import { Waiting } from "./parts/bits.js";
import { Toasts } from "./parts/toasts.js";

// What a page takes is fetched when it is first shown, or before that once the first page stands.
const SOURCES = {
  login: () => import("./parts/login.js").then((module) => module.Login),
  pool: () => import("./pool/page.js").then((module) => module.PoolPage),
  models: () => import("./models/page.js").then((module) => module.ModelsPage),
  chat: () => import("./chat/page.js").then((module) => module.ChatPage),
  jobs: () => import("./jobs/page.js").then((module) => module.JobsPage),
  logs: () => import("./logs/page.js").then((module) => module.LogsPage),
};
// By then the first page has drawn what the server told it.
const PREFETCH_AFTER_MS = 500;
const views = signal({});

/** What is to be seen now: a page, or the login in its place. */
function viewNow() {
  return needsKey.value ? "login" : route.value.page;
}

async function fetchView(page) {
  if (views.value[page]) return;
  try {
    const [View] = await Promise.all([SOURCES[page](), page === "login" || styles(`css/${page}.css`)]);
    views.value = { ...views.value, [page]: View };
  } catch (err) {
    say(`The page can't be shown: ${err.message}`, "error");
  }
}

function App() {
  const page = viewNow();
  const first = useRef(true);
  const View = views.value[page];
  useEffect(() => {
    // Not on arrival: the browser's own start of reading is the top of the page.
    if (first.current) first.current = false;
    else if (!document.activeElement?.closest("main")) document.querySelector("main h1")?.focus();
    fetchView(page);
  }, [page, View]);
  if (page === "login") return html`${View && html`<${View} />`}<${Toasts} />`;
  return html`<${Shell}>${View ? html`<${View} />` : html`<${Waiting} label="Fetching the page" />`}<//><${Confirmation} /><${Toasts} />`;
}

start();
await fetchView(viewNow());
render(html`<${App} />`, document.getElementById("app"));
performance.mark("interactive");
setTimeout(() => PAGES.forEach(fetchView), PREFETCH_AFTER_MS);
