// Stylesheets that come with a page: the first view should not wait for those of the others.

const fetched = new Map();

/** Resolves when the stylesheet is in effect. path: below /static. A second call is the first one's. */
export function styles(path) {
  if (!fetched.has(path)) {
    fetched.set(
      path,
      new Promise((resolve, reject) => {
        const link = document.createElement("link");
        link.rel = "stylesheet";
        link.href = `static/${path}`;
        link.onload = resolve;
        link.onerror = () => {
          fetched.delete(path);
          link.remove();
          reject(new Error(`${path} could not be fetched`));
        };
        document.head.append(link);
      }),
    );
  }
  return fetched.get(path);
}
