// Runs before the first paint, so that a dark page never flashes white.
try {
  const kept = localStorage.getItem("mlxpool.theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // Storage is switched off: the system's choice holds.
}
