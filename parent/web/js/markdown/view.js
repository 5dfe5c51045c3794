// Markdown as the page shows it. `marked` cuts the text into tokens and nothing more; the tokens become elements
// here, and every piece of text a text node. No HTML is ever parsed: a tag in an answer is shown as it was
// written, an image is a link (loading it would tell its server), and a link leads to http, https or mail only.

import { Component, Fragment, html, useState } from "../lib.js";
import { lexer } from "../../vendor/marked-18.2.1/marked.js";
import { Icon } from "../parts/icons.js";
import { decodeEntities } from "./entities.js";

const SAFE_LINK = /^(https?:|mailto:)/i;
const COPIED_MS = 1_500;

/** A text as elements. While it grows, the blocks that are complete are not drawn again. */
export function Markdown({ text }) {
  let blocks;
  try {
    blocks = lexer(text, { gfm: true });
  } catch {
    // Nested deeper than the parser's stack: plain text says as much.
    blocks = [{ type: "code", raw: text, text, lang: "" }];
  }
  return html`<div class="markdown">${blocks.map((token, i) => html`<${Block} key=${i} token=${token} />`)}</div>`;
}

class Block extends Component {
  shouldComponentUpdate(next) {
    return next.token.raw !== this.props.token.raw || next.token.type !== this.props.token.type;
  }

  render({ token }) {
    return block(token);
  }
}

const blocksOf = (tokens) => tokens.map((token) => block(token));

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      // The page has its own h1 and h2; an answer's headings come below them.
      return html`<${`h${Math.min(6, token.depth + 2)}`}>${inline(token.tokens)}<//>`;
    case "paragraph":
      return html`<p>${inline(token.tokens)}</p>`;
    case "text":
      return token.tokens ? html`<${Fragment}>${inline(token.tokens)}<//>` : decodeEntities(token.text);
    case "code":
      return html`<${Code} text=${token.text} language=${token.lang ?? ""} />`;
    case "blockquote":
      return html`<blockquote>${blocksOf(token.tokens)}</blockquote>`;
    case "list":
      return token.ordered
        ? html`<ol start=${token.start === "" ? 1 : token.start}>${token.items.map(item)}</ol>`
        : html`<ul>${token.items.map(item)}</ul>`;
    case "table":
      return html`<${Table} token=${token} />`;
    case "hr":
      return html`<hr />`;
    case "html":
      return html`<p class="verbatim">${token.raw.trimEnd()}</p>`;
    default:
      return token.raw;
  }
}

function item(token) {
  return html`<li class=${token.task ? "task" : undefined}>${blocksOf(token.tokens)}</li>`;
}

function Table({ token }) {
  const cell = (tag, at) => (data, i) => html`<${tag} class="align-${token.align[i] ?? "left"}" key=${i} scope=${at}>${inline(data.tokens)}<//>`;
  return html`<div class="table-box" tabindex="0" role="group" aria-label="Table"><table>
    <thead><tr>${token.header.map(cell("th", "col"))}</tr></thead>
    <tbody>${token.rows.map((row) => html`<tr>${row.map(cell("td"))}</tr>`)}</tbody>
  </table></div>`;
}

function Code({ text, language }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), COPIED_MS);
  };
  const name = language.split(/\s/)[0];
  return html`<div class="code">
    <div class="code-head"><span>${name || "text"}</span>
      <button type="button" class="icon-button" aria-label=${copied ? "Copied" : "Copy code"} onClick=${copy}><${Icon} name="copy" /></button></div>
    <pre tabindex="0" role="group" aria-label=${name ? `Code, ${name}` : "Code"}><code>${text}</code></pre>
  </div>`;
}

function inline(tokens) {
  return (tokens ?? []).map((token) => {
    switch (token.type) {
      case "text":
        return token.tokens ? inline(token.tokens) : decodeEntities(token.text);
      case "escape":
        return token.text;
      case "strong":
        return html`<strong>${inline(token.tokens)}</strong>`;
      case "em":
        return html`<em>${inline(token.tokens)}</em>`;
      case "del":
        return html`<del>${inline(token.tokens)}</del>`;
      case "codespan":
        return html`<code>${token.text}</code>`;
      case "br":
        return html`<br />`;
      case "checkbox":
        return html`<input type="checkbox" disabled checked=${token.checked} aria-label=${token.checked ? "done" : "to do"} />`;
      case "link":
        return link(token.href, inline(token.tokens), token.raw);
      case "image":
        return link(token.href, token.text ? `image: ${token.text}` : "image", token.raw);
      default:
        return token.raw; // html among it: shown as written
    }
  });
}

function link(href, content, raw) {
  if (!SAFE_LINK.test(href)) return raw;
  return html`<a href=${href} target="_blank" rel="noopener noreferrer nofollow">${content}</a>`;
}
