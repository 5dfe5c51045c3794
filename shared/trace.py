"""The trace file: one JSON line per request and process, joined by the request's id.

Several processes append to one file; each line is one write, which the kernel keeps whole.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import msgspec

from mlxpool.shared.colibri.stats import ExpertSummary

Outcome = Literal["ok", "error", "cancelled"]

FILE_NAME = "trace.jsonl"


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line. time: unix seconds of its writing. phases_ms: since this process began with the request.
    experts: that were read for it, of a model that streams them."""

    time: float
    request: str
    process: Literal["parent", "worker"]
    model: str
    outcome: Outcome
    phases_ms: dict[str, float]
    experts: ExpertSummary | None = None


class TraceFile:
    """An open trace file. Raises OSError where it can't be opened."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(
        self,
        request: str,
        process: Literal["parent", "worker"],
        model: str,
        outcome: Outcome,
        phases_ms: dict[str, float],
        experts: ExpertSummary | None = None,
    ) -> None:
        """Append a line; a full disk loses it, never the request."""
        line = TraceLine(time.time(), request, process, model, outcome, phases_ms, experts)
        try:
            os.write(self._descriptor, msgspec.json.encode(line) + b"\n")
        except OSError:
            pass

    def close(self) -> None:
        """No more lines."""
        os.close(self._descriptor)
