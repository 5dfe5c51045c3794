// Which page is shown: the part of the address behind the #. `#/chat/abc?model=m` is page "chat", rest "abc",
// and a query of its own.

import { signal } from "../lib.js";

export const PAGES = ["pool", "models", "chat", "jobs", "logs"];

function parse() {
  const [path, query = ""] = location.hash.split("?", 2);
  const [, page = "", ...rest] = path.split("/");
  const known = PAGES.includes(page) ? page : "pool";
  const params = new URLSearchParams(query);
  try {
    return { page: known, rest: rest.map(decodeURIComponent).join("/"), params };
  } catch {
    return { page: known, rest: "", params };
  }
}

/** {page, rest, params} */
export const route = signal(parse());

addEventListener("hashchange", () => {
  route.value = parse();
});

/** The address of a page. */
export function linkTo(page, rest = "") {
  return `#/${page}${rest ? `/${rest.split("/").map(encodeURIComponent).join("/")}` : ""}`;
}

/** Go there. replace: without a step in the browser's history. */
export function go(page, rest = "", replace = false) {
  if (replace) {
    history.replaceState(null, "", linkTo(page, rest));
    route.value = parse();
  } else {
    location.hash = linkTo(page, rest);
  }
}
