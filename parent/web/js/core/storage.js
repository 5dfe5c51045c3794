// What the page keeps in the browser. Storage may be switched off or full; then things last as long as the page.
//
// Names begin with `mlxpool.`: a server on the same address and another port is another origin, but the user's
// other pages on this one are not.

const PREFIX = "mlxpool.";

/** The area by its name; null where the browser refuses it. */
function area(session) {
  try {
    return session ? sessionStorage : localStorage;
  } catch {
    return null;
  }
}

/** The kept text, or null. session: of this tab alone. */
export function read(name, session = false) {
  return area(session)?.getItem(PREFIX + name) ?? null;
}

/** The kept value, or null where there is none or it can't be read. */
export function readJson(name) {
  try {
    return JSON.parse(read(name));
  } catch {
    return null;
  }
}

/** Keep a text; null forgets it. False where there is no room. */
export function keep(name, text, session = false) {
  try {
    if (text === null) area(session)?.removeItem(PREFIX + name);
    else area(session)?.setItem(PREFIX + name, text);
    return area(session) !== null;
  } catch {
    return false;
  }
}

/** Call with a name when another tab changes what is kept under it. */
export function onChange(changed) {
  addEventListener("storage", ({ key }) => {
    if (key?.startsWith(PREFIX)) changed(key.slice(PREFIX.length));
  });
}
