"""The log of each job: its events, one JSON line each, in home/jobs/<id>.ndjson.

An event is a message of the job's process (`shared/job_lines.py`) or of the runner (below), with the time in
it: `{"type": "stage", "time": 1767225600.0, "name": …}`. Lines are appended whole, by one thread at a time,
behind the loop; what a killed server left half written at the end is cut off before the next is appended. So
a byte offset behind a newline names a place between two events for as long as the file is there.

A job that talks without end keeps its end: past `MAX_LOG_BYTES` its lines and repeated stages are dropped and
counted. A disk that takes nothing costs events, never the job.

`JobLogs` belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from mlxpool.shared.job_lines import Done, Failed, Line, Log, Metric, Stage
from mlxpool.shared.text import cut

logger = logging.getLogger("mlxpool.jobs")

# Of a job's log: hours of a chatty job, and a page still reads it in a moment.
MAX_LOG_BYTES = 16 * 2**20
# Figures and new stages are worth more than lines; of these, too, there may be no end.
MAX_FIGURES_BYTES = 2 * MAX_LOG_BYTES
# A longer line is no line for a person.
MAX_LINE_CHARS = 4000
# What a torn end is looked for in: more than the longest event (process.MAX_LINE_BYTES) has.
TAIL_BYTES = 4 * 2**20

# Colours and cursor movements, then whatever else a terminal would obey.
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Its process is being started."""


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """It was ended. message: by whom."""

    message: str


class Interrupted(msgspec.Struct, frozen=True, tag="interrupted"):
    """The server died under it."""

    error: str


Event = Line | Started | Cancelled | Interrupted
# Nothing comes after one of these.
FINAL = (Done, Failed, Cancelled, Interrupted)
FINAL_TYPES = frozenset({"done", "failed", "cancelled", "interrupted"})
TYPES = frozenset({"started", "stage", "metric", "log"}) | FINAL_TYPES


def encode_event(event: Event, at: float) -> bytes:
    """The event as its line in the log, without the line's end. at: unix seconds."""
    fields = msgspec.to_builtins(_short(event))
    return msgspec.json.encode({"type": fields.pop("type"), "time": round(at, 3), **fields})


class JobLogs:
    """All logs. Created in the running loop; `close` before it ends."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now = now
        self._open: dict[str, _Unwritten] = {}
        self._viewers: dict[str, set[asyncio.Event]] = {}

    def path(self, job_id: str) -> Path:
        """Where a job's log is, if it has one. job_id: of a row."""
        return self._folder / f"{job_id}.ndjson"

    def say(self, job_id: str, event: Event) -> None:
        """An event of a job. It is written, as far as that can be, soon after."""
        log = self._open.setdefault(job_id, _Unwritten())
        log.add(event, self._now())
        if log.writing is None and log.lines:
            log.writing = asyncio.get_running_loop().create_task(self._write(job_id, log))

    def is_written(self, job_id: str) -> bool:
        """Whether everything that was said of a job is in its log, or was given up."""
        return job_id not in self._open

    @contextlib.contextmanager
    def watching(self, job_id: str, woken: asyncio.Event) -> Iterator[None]:
        """`woken` is set whenever the log may have grown, or ended."""
        self._viewers.setdefault(job_id, set()).add(woken)
        try:
            yield
        finally:
            self._viewers[job_id].discard(woken)
            if not self._viewers[job_id]:
                del self._viewers[job_id]

    def forget(self, job_id: str) -> None:
        """Delete the log of an ended job, beside the loop."""
        asyncio.get_running_loop().run_in_executor(None, _delete, self.path(job_id))
        self._wake(job_id)

    async def close(self) -> None:
        """Returns when everything is written or given up."""
        while writing := [log.writing for log in self._open.values() if log.writing is not None]:
            await asyncio.wait(writing)

    async def _write(self, job_id: str, log: _Unwritten) -> None:
        while log.lines:
            lines, log.lines = log.lines, []
            try:
                await asyncio.to_thread(append, self.path(job_id), b"".join(lines))
            except OSError as problem:
                if not log.is_lossy:
                    logger.error("the log of job %s can't be written: %s", job_id, problem)
                log.is_lossy = True
            self._wake(job_id)
        log.writing = None
        if log.is_final:
            del self._open[job_id]
            self._wake(job_id)

    def _wake(self, job_id: str) -> None:
        for woken in self._viewers.get(job_id, ()):
            woken.set()


class _Unwritten:
    """What of one job's events is still to be written, and what was counted of all of them."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.writing: asyncio.Task[None] | None = None
        self.is_final = False
        self.is_lossy = False
        self._bytes = 0
        self._dropped = 0
        self._stage = ""

    def add(self, event: Event, at: float) -> None:
        line = encode_event(event, at) + b"\n"
        if isinstance(event, FINAL):
            self.is_final = True
            if self._dropped:
                told = Log(f"{self._dropped} lines are left out above: the log is full")
                self.lines.append(encode_event(told, at) + b"\n")
        elif not self._has_room(event, len(line)):
            self._dropped += 1
            return
        if isinstance(event, Stage):
            self._stage = event.name
        self._bytes += len(line)
        self.lines.append(line)

    def _has_room(self, event: Event, size: int) -> bool:
        is_chatter = isinstance(event, Log) or (isinstance(event, Stage) and event.name == self._stage)
        return self._bytes + size <= (MAX_LOG_BYTES if is_chatter else MAX_FIGURES_BYTES)


def append(path: Path, lines: bytes) -> None:
    """Whole lines to the end of the file, all of them or none. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is no regular file")
        size = _whole(descriptor)
        try:
            left = memoryview(lines)
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _whole(descriptor: int) -> int:
    """The size of the file once an unfinished last line is cut off."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return size
    begin = max(0, size - TAIL_BYTES)
    whole = begin + os.pread(descriptor, size - begin, begin).rfind(b"\n") + 1
    os.ftruncate(descriptor, whole)
    return whole


def _short(event: Event) -> Event:
    """The event with its texts fit to be kept and shown."""
    match event:
        case Stage(name, progress, message):
            return Stage(_text(name), min(1.0, max(0.0, progress)), _text(message))
        case Log(line):
            return Log(_text(line))
        case Failed(error):
            return Failed(_text(error))
        case Interrupted() | Cancelled() | Metric() | Done() | Started():
            return event


def _text(text: str) -> str:
    return cut(_CONTROLS.sub("", text), MAX_LINE_CHARS)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
