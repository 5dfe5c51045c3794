// The few icons of the page, drawn on a 16 by 16 grid in the text's colour. All are decoration: what a control
// does is said by its label.

import { html } from "../lib.js";

const PATHS = {
  pool: "M2 4.5h12v7H2zM5 2v2.5M8 2v2.5M11 2v2.5M5 11.5V14M8 11.5V14M11 11.5V14",
  models: "M2.5 5 8 2l5.5 3v6L8 14l-5.5-3zM2.5 5 8 8l5.5-3M8 8v6",
  chat: "M2 3h12v8H7l-3 3v-3H2z",
  jobs: "M2.5 5.5h11v8h-11zM5.5 5.5v-3h5v3M2.5 9h11M8 8v2",
  logs: "M3 3.5h10M3 6.5h7M3 9.5h10M3 12.5h5",
  pin: "M5.5 2h5M6.5 2v4L4.5 9h7l-2-3V2M8 9v5",
  search: "M7 11.5a4.5 4.5 0 1 0 0-9 4.5 4.5 0 0 0 0 9zM10.5 10.5 14 14",
  plus: "M8 3v10M3 8h10",
  close: "M4 4l8 8M12 4l-8 8",
  send: "M8 13V3M4 7l4-4 4 4",
  stop: "M4.5 4.5h7v7h-7z",
  copy: "M5.5 5.5V2.5h8v8h-3M2.5 5.5h8v8h-8z",
  retry: "M13 8a5 5 0 1 1-1.5-3.5L13 6M13 2.5V6H9.5",
  edit: "M3 13l.7-3L10.5 3.200l2.300 2.300L6 12.300z",
  trash: "M3 4.5h10M6 4.5V2.5h4v2M4.5 4.5l.5 9h6l.5-9M6.800 7v4M9.200 7v4",
  switch: "M2.5 5.5h10M10 3l2.5 2.5L10 8M13.5 10.5h-10M6 8l-2.5 2.5L6 13",
  down: "M4 6l4 4 4-4",
  settings: "M2 4.5h7M12 4.5h2M2 11.5h2M7 11.5h7M10.5 3v3M5.5 10v3",
  menu: "M2.5 4h11M2.5 8h11M2.5 12h11",
  pause: "M5.5 3.5v9M10.5 3.5v9",
  play: "M5 3l8 5-8 5z",
  light: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6zM8 1.5v1.5M8 13v1.5M1.5 8H3M13 8h1.5M3.400 3.400l1.100 1.100M11.5 11.5l1.100 1.100M3.400 12.600l1.100-1.100M11.5 4.5l1.100-1.100",
  dark: "M13 9.5A5.5 5.5 0 0 1 6.5 3a5.5 5.5 0 1 0 6.5 6.5z",
  system: "M2 3h12v8H2zM6 14h4M8 11v3",
  signout: "M9 2.5H3v11h6M6.5 8H14M11.5 5.5 14 8l-2.5 2.5",
  load: "M8 2.5v7M5 6.5l3 3 3-3M3 13h10",
  unload: "M8 10V3M5 6l3-3 3 3M3 13h10",
  wrap: "M2.5 4h11M2.5 8h9a2 2 0 0 1 0 4H8M9.5 10.5 8 12l1.5 1.5M2.5 12H5",
};

/** One icon by its name. */
export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;
}
