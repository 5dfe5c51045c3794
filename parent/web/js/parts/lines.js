// Many lines of text in a box that scrolls, and stays at its end while they come.

import { Component, html, useLayoutEffect, useMemo, useRef } from "../lib.js";

// Lines are drawn in groups: a group that is full is never drawn again.
const GROUP_LINES = 100;
const AT_END_PX = 24;

/**
 * lines: {n, text, model?}, n counting up. paused: what is shown stays where it is. onFollows(yes): a person has
 * scrolled to the end, or away from it. children: what is shown where there is no line.
 */
export function Lines({ lines, showModel = false, wrap, paused, label = "Log lines", onFollows, children }) {
  const box = useRef(null);
  const follows = useRef(true);
  const wasPaused = useRef(paused);
  useLayoutEffect(() => {
    // Who lets it go on wants to see the end, wherever it was held.
    if (wasPaused.current && !paused && onFollows) follows.current = true;
    wasPaused.current = paused;
    if (follows.current && !paused) box.current.scrollTop = box.current.scrollHeight;
  });
  const onScroll = ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
    const atEnd = scrollHeight - scrollTop - clientHeight < AT_END_PX;
    if (atEnd !== follows.current) onFollows?.(atEnd);
    follows.current = atEnd;
  };
  const groups = useMemo(() => grouped(lines), [lines]);
  return html`<div class="log ${wrap ? "wrap" : ""}" ref=${box} onScroll=${onScroll} tabindex="0" role="log" aria-live=${paused ? "off" : "polite"} aria-label=${label}>
    ${lines.length === 0 ? children : groups.map((group) => html`<${Group} key=${Math.floor(group[0].n / GROUP_LINES)} lines=${group} showModel=${showModel} />`)}
  </div>`;
}

class Group extends Component {
  shouldComponentUpdate({ lines, showModel }) {
    const before = this.props;
    return lines.length !== before.lines.length || lines.some((line, i) => line !== before.lines[i]) || showModel !== before.showModel;
  }

  render({ lines, showModel }) {
    return html`<div class="log-group">
      ${lines.map((line) => html`<div class="log-line" key=${line.n}>${showModel && html`<span class="log-model">${line.model}</span>`}<span class="log-text">${line.text}</span></div>`)}
    </div>`;
  }
}

/** Cut at fixed numbers, so that a group keeps its key and content while lines are added behind it. */
function grouped(lines) {
  const groups = [];
  for (const line of lines) {
    const last = groups.at(-1);
    if (last && Math.floor(last[0].n / GROUP_LINES) === Math.floor(line.n / GROUP_LINES)) last.push(line);
    else groups.push([line]);
  }
  return groups;
}
