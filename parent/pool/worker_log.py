"""A worker's stdout and stderr: one log file per model, rotated, and the last lines in memory.

A thread reads the pipe, so a worker that writes much never waits for the event loop, and the loop never waits
for the disk. The tail is what a load failure tells the client beside the worker's own reason.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# Two files of this size per model: weeks of ordinary use, and a crash loop can't fill a disk.
MAX_LOG_BYTES = 8 * 2**20
TAIL_LINES = 20
# A line longer than this is cut in the tail (not in the file): error messages are made of the tail.
TAIL_LINE_CHARS = 400


class RotatingLog:
    """Append-only file that moves to `<name>.1` when it is full. Shared by the workers of one model.

    listener: called with each line that was written, on the thread that wrote it.
    """

    def __init__(
        self, path: Path, max_bytes: int = MAX_LOG_BYTES, listener: Callable[[bytes], None] | None = None
    ) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._listener = listener
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        """Append; a full or missing disk loses the line, never the worker."""
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("ab") as file:
                    if file.tell() + len(data) > self._max_bytes and file.tell() > 0:
                        file.close()
                        self.path.replace(self.path.with_name(self.path.name + ".1"))
                        with self.path.open("ab") as fresh:
                            fresh.write(data)
                    else:
                        file.write(data)
            except OSError:
                pass
        if self._listener is not None:
            self._listener(data)


class OutputReader(threading.Thread):
    """Reads one worker's output to its end. `tail()` may be called from any thread."""

    def __init__(self, stream: BinaryIO, log: RotatingLog) -> None:
        super().__init__(daemon=True, name=f"log {log.path.stem}")
        self._stream = stream
        self.log = log  # may be another one from the next line on: a spare's, then its model's
        self._lines: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)

    def run(self) -> None:
        """Until the pipe closes."""
        with self._stream:
            for line in self._stream:
                self.log.write(line)
                self._lines.append(line.decode("utf-8", "replace").rstrip()[:TAIL_LINE_CHARS])

    def tail(self) -> list[str]:
        """The last lines that hold anything, oldest first."""
        return [line for line in list(self._lines) if line]


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, oldest first; [] where there is none. Reads the end of the file alone."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - count * TAIL_LINE_CHARS))
            return file.read().decode("utf-8", "replace").splitlines()[-count:] if count else []
    except OSError:
        return []


def log_path(folder: Path, model: str) -> Path:
    """The log file of a model; a name like org/name becomes one file name."""
    return folder / f"{model.replace('/', '--')}.log"
