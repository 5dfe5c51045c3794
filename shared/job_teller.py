"""How a job's process tells of itself: `say` a line, `Teller` for progress that comes too often to be read.

Everything here may be called from any thread.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import msgspec

from .job_lines import Line, Metric, Stage
from .units import format_size

# People see a bar move; more lines a second only cost the reader time.
REPORT_INTERVAL_S = 0.2

_writing = threading.Lock()


def say(line: Line) -> None:
    """One line on stdout. A reader that is gone is the tether's business, not an error here."""
    data = msgspec.json.encode(line) + b"\n"
    with _writing:
        try:
            while data:
                data = data[os.write(sys.stdout.fileno(), data) :]
        except OSError:
            pass


class Teller:
    """Says how far a job is, seldom enough to be read: a new stage at once, else the newest word of each
    interval."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stage = ""
        self._untold: Line | None = None
        threading.Thread(target=self._tell, daemon=True, name="progress").start()

    def progress(self, share: float, stage: str, detail: str = "") -> None:
        """share: 0 to 1 of the whole job. stage: one word."""
        line = Stage(stage, round(share, 4), detail)
        with self._lock:
            is_new, self._stage = stage != self._stage, stage
            self._untold = None if is_new else line
            if is_new:
                say(line)

    def bytes(self, share: float, stage: str, done: int, total: int) -> None:
        """As `progress`, with sizes for a person."""
        self.progress(share, stage, f"{format_size(done)} of {format_size(total)}")

    def metric(self, **values: float) -> None:
        """Figures, each time."""
        say(Metric(values))

    def _tell(self) -> None:
        while True:
            time.sleep(REPORT_INTERVAL_S)
            with self._lock:
                line, self._untold = self._untold, None
                if line is not None:
                    say(line)
