"""A server's own output in a file that can't grow without end: `mlxpool up --log-file`.

A service manager gives its process a file or a pipe for stdout and stderr and never looks at it again; under
launchd that file grows until the disk is full, fastest in a crash loop. So the process takes its output into
its own hands: descriptors 1 and 2 become the log file, which catches what Python, its libraries and the
interpreter's last words write, and after each write from Python the file's size is looked at. A full file
moves to `<name>.1` and the descriptors are pointed at a new one; nobody who writes to them notices.

`LogFile` owns descriptors 1 and 2 from `attach` on. Any thread may write.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path
from typing import IO

# Two files of this size: a start that fails twice a minute takes a month to come round.
MAX_LOG_BYTES = 8 * 2**20
_STDOUT, _STDERR = 1, 2


class LogFile:
    """An append-only file that stdout and stderr go to. Raises OSError where it can't be opened."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def attach(self) -> None:
        """From here on stdout and stderr, the descriptors and Python's objects, are this file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        self._open()
        sys.stdout = _Watched(_STDOUT, self)
        sys.stderr = _Watched(_STDERR, self)
        self.rotate_if_full()

    def rotate_if_full(self) -> None:
        """Begin a new file when this one is full; where that fails the old one goes on growing."""
        with self._lock:
            try:
                if os.fstat(_STDERR).st_size <= self._max_bytes:
                    return
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._open()
            except OSError:
                pass

    def _open(self) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.dup2(descriptor, _STDOUT)
            os.dup2(descriptor, _STDERR)
        finally:
            os.close(descriptor)


class _Watched(io.TextIOWrapper):
    """Text for one of the descriptors: each line is written at once, then the file's size is looked at."""

    def __init__(self, descriptor: int, log: LogFile) -> None:
        raw: IO[bytes] = io.FileIO(descriptor, "wb", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        self._log = log

    def write(self, text: str) -> int:
        try:
            count = super().write(text)
        except OSError:
            return len(text)  # a full disk loses the line, never the server
        if text.endswith("\n"):
            self._log.rotate_if_full()
        return count
