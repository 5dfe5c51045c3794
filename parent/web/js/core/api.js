// Requests to the server: the key goes with each of them, a refusal comes back as one kind of error.
//
// Owns the key. It is kept for the tab, or for the browser when the user says so. Any answer of 401, whichever
// request it was for, raises `needsKey`, and the shell shows the login in place of the page.

import { signal } from "../lib.js";
import { keep, read } from "./storage.js";

const KEY_NAME = "key";

/** True from the first 401 until a key has been accepted. */
export const needsKey = signal(false);

/** The key in use; empty where none is. */
export const apiKey = signal(read(KEY_NAME, true) ?? read(KEY_NAME) ?? "");

/** A refusal by the server, or (status 0) no answer at all. `message` is meant for a person. */
export class ApiFailure extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Use this key from now on. remember: also after the tab is closed. An empty key forgets it. */
export function useKey(key, remember = false) {
  apiKey.value = key;
  keep(KEY_NAME, remember ? null : key || null, true);
  keep(KEY_NAME, remember ? key || null : null);
}

/**
 * `fetch` of a path of this server, with the key. Relative to the page, so that a proxy may add a prefix.
 * fine: statuses that are answers like any other though they say that something did not go well.
 */
export async function request(path, { method = "GET", body, signal: abort, fine = [] } = {}) {
  const headers = {};
  if (apiKey.value) headers.Authorization = `Bearer ${apiKey.value}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: abort,
      cache: "no-store",
    });
  } catch (err) {
    if (err.name === "AbortError") throw err;
    throw new ApiFailure(0, "unreachable", "The server does not answer. Is mlxpool running?");
  }
  if (response.ok || fine.includes(response.status)) return response;
  if (response.status === 401) needsKey.value = true;
  throw await failureOf(response);
}

/** The decoded answer of one request. Throws ApiFailure. */
export async function call(method, path, body, fine) {
  const response = await request(path, { method, body, fine });
  return response.status === 204 ? null : response.json();
}

async function failureOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const { error } = JSON.parse(text);
    return new ApiFailure(response.status, error.code ?? "error", error.message);
  } catch {
    return new ApiFailure(response.status, "error", `The server answered ${response.status}.`);
  }
}

/** A model's own paths: its name may hold slashes, which stay, and anything else, which is escaped. */
export function modelPath(name, action) {
  return `api/models/${name.split("/").map(encodeURIComponent).join("/")}/${action}`;
}
