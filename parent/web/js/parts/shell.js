// What is around every page: the bar with the pages, the state of the connection, the theme.

import { html, useEffect } from "../lib.js";
import { apiKey, needsKey, useKey } from "../core/api.js";
import { span } from "../core/format.js";
import { connection, outdated, retryNow } from "../core/live.js";
import { useNow } from "../core/now.js";
import { linkTo, route } from "../core/router.js";
import { nextTheme, theme } from "../core/theme.js";
import { Icon } from "./icons.js";

const TITLES = { pool: "Pool", models: "Models", chat: "Chat", jobs: "Jobs", logs: "Logs" };

function Navigation() {
  return html`<nav class="nav" aria-label="Pages">
    ${Object.entries(TITLES).map(([page, title]) => html`<a key=${page} href=${linkTo(page)} class="nav-link"
        aria-current=${route.value.page === page ? "page" : undefined}><${Icon} name=${page} /><span>${title}</span></a>`)}
  </nav>`;
}

const CONNECTION_WORDS = { connecting: "Connecting", open: "Live", lost: "Disconnected", paused: "Paused" };

function ConnectionState() {
  const { state } = connection.value;
  return html`<span class="connection ${state}" role="status"><span class="dot" aria-hidden="true"></span>${CONNECTION_WORDS[state]}</span>`;
}

/** The strip that says that what is shown may be old. */
function DisconnectedStrip() {
  const { state, retryAt, reason } = connection.value;
  const nowMs = useNow(state === "lost");
  if (state !== "lost") return null;
  const wait = Math.max(0, retryAt - nowMs) / 1000;
  return html`<div class="strip" role="alert">
    <span><strong>Disconnected.</strong> ${reason} <span aria-hidden="true">${wait >= 1 ? `Next try in ${span(Math.ceil(wait))}.` : "Trying again…"}</span></span>
    <button type="button" class="button small" onClick=${retryNow}>Try now</button>
  </div>`;
}

function OutdatedStrip() {
  if (!outdated.value) return null;
  return html`<div class="strip calm" role="status">
    <span>The server has been updated.</span>
    <button type="button" class="button small" onClick=${() => location.reload()}>Reload the page</button>
  </div>`;
}

/** The bar, the strips, and the page inside. */
export function Shell({ children }) {
  const { page } = route.value;
  useEffect(() => {
    document.title = `${TITLES[page]} · mlxpool`;
  }, [page]);
  const signOut = () => {
    useKey("");
    needsKey.value = true;
  };
  return html`<div class="shell page-${page}">
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.querySelector("main h1")?.focus(); }}>Skip to content</a>
    <header class="bar">
      <a class="brand" href=${linkTo("pool")} aria-label="mlxpool, to the pool"><span class="mark" aria-hidden="true"></span>mlxpool</a>
      <${Navigation} />
      <div class="bar-side">
        <${ConnectionState} />
        <button type="button" class="icon-button" aria-label="Theme: ${theme.value}" title="Theme: ${theme.value}" onClick=${nextTheme}><${Icon} name=${theme.value} /></button>
        ${apiKey.value && html`<button type="button" class="icon-button" aria-label="Sign out" title="Sign out: forget the API key" onClick=${signOut}><${Icon} name="signout" /></button>`}
      </div>
    </header>
    <${DisconnectedStrip} /><${OutdatedStrip} />
    <main id="main" class="main">${children}</main>
  </div>`;
}

/** A page's heading: it takes the focus when the page is gone to, so that a screen reader says where one is. */
export function Heading({ children, class: name = "" }) {
  return html`<h1 tabindex="-1" class=${name}>${children}</h1>`;
}
