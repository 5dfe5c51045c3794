"""The system's Chromium, and how it is started: headless, and asking nobody anything on its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
# A window's address bar is two pages of its own, which nobody sees: ten times the work of a page of ours.
ADDRESS_BAR = ("WebUIOmniboxPopup", "WebUIOmniboxAimPopup")
# Chromium hears the last list alone, so what playwright turns off is named again.
TURNED_OFF_BY_PLAYWRIGHT = (
    "AimEnabled",
    "AvoidCorsURLLoaderRestartOnRedirect",
    "AvoidUnnecessaryBeforeUnloadCheckSync",
    "DestroyProfileOnBrowserClose",
    "HttpsFirstBalancedModeAutoEnable",
    "HttpsUpgrades",
    "LensOverlay",
    "MediaRouter",
    "NetworkTimeServiceQuerying",
    "OptimizationHints",
    "PaintHolding",
    "PreconnectToSearch",
    "ThirdPartyStoragePartitioning",
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-features=" + ",".join(ADDRESS_BAR + TURNED_OFF_BY_PLAYWRIGHT),
]


def find_chromium() -> str:
    """Its path: $CHROMIUM, else the first of its usual names. Raises FileNotFoundError."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and MAC.exists():
        found = str(MAC)
    if found is None:
        raise FileNotFoundError("no Chromium: apt-get install chromium, or name one in $CHROMIUM")
    return found
