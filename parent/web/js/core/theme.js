// Light, dark, or as the system says. theme_boot.js sets the kept choice before the first paint.

import { signal } from "../lib.js";
import { keep } from "./storage.js";

const ORDER = ["system", "light", "dark"];

/** "system", "light" or "dark" */
export const theme = signal(document.documentElement.dataset.theme ?? "system");

/** The next choice in turn. */
export function nextTheme() {
  const chosen = ORDER[(ORDER.indexOf(theme.value) + 1) % ORDER.length];
  theme.value = chosen;
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  keep("theme", chosen === "system" ? null : chosen);
}
