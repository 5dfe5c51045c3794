"""The system's Chromium, and how it is started: headless, and asking nobody anything on its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str:
    """Its path: $CHROMIUM, else the first of its usual names. Raises FileNotFoundError."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and MAC.exists():
        found = str(MAC)
    if found is None:
        raise FileNotFoundError("no Chromium: apt-get install chromium, or name one in $CHROMIUM")
    return found
