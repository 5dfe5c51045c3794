// Models that reason write `<think>…</think>` before their answer where the server does not take it apart.

const OPEN = "<think>";
const CLOSE = "</think>";

/** {reasoning, answer}: the text before and after the end of the thinking. Works on unfinished text too. */
export function splitThinking(text) {
  const start = text.trimStart();
  if (!start.startsWith(OPEN)) {
    // The very first characters of a tag are not shown as an answer that then vanishes.
    return OPEN.startsWith(start) && start !== "" ? { reasoning: "", answer: "" } : { reasoning: "", answer: text };
  }
  const inside = start.slice(OPEN.length);
  const end = inside.indexOf(CLOSE);
  if (end < 0) return { reasoning: inside.trim(), answer: "" };
  return { reasoning: inside.slice(0, end).trim(), answer: inside.slice(end + CLOSE.length).trimStart() };
}
