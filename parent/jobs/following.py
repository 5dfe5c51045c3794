"""Reading a job's log from a place on, to its end, while it is being written.

A reader has nothing but an offset: it reads a piece of the file, on a thread, hands it on, and reads the next
when it comes back. Nobody keeps anything for one that is slow, and one that stays away costs nothing at all.
It is over with the job's last event; where the disk took none, with what the row says.

`Readers` belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from mlxpool.shared.errors import error
from mlxpool.shared.files import open_regular
from mlxpool.shared.job_lines import Done, Failed

from .log import FINAL_TYPES, TAIL_BYTES, TYPES, Cancelled, Event, Interrupted, JobLogs, encode_event
from .store import Job, JobStore

# One piece: as much as a connection takes at once.
PIECE_BYTES = 64 * 1024
# Proxies and browsers drop a connection that is silent for a minute or so.
COMMENT_INTERVAL_S = 15.0
# In all: one beyond it is a page that reconnects without closing.
MAX_READERS = 64


class _Type(msgspec.Struct):
    type: str


class _Piece(NamedTuple):
    """Server-sent events, where the next piece begins, and whether the last event is among them."""

    events: bytes
    next: int
    is_end: bool


class Readers:
    """All who read logs."""

    def __init__(self, store: JobStore, logs: JobLogs) -> None:
        self._store = store
        self._logs = logs
        self._count = 0

    async def read(self, job: Job, offset: int, follow: bool) -> AsyncIterator[bytes]:
        """Server-sent events behind the byte `offset` of the job's log: to the last one with `follow`, else
        those that are there. What comes first may be empty; a comment comes after so much silence.

        Raises ApiError, before anything else, where the log has no such place or too many read.
        """
        if self._count >= MAX_READERS:
            raise error("queue_full", f"{MAX_READERS} viewers read logs already, the limit", retry_after_s=5)
        self._count += 1
        try:
            path = self._logs.path(job.id)
            place, size = await asyncio.to_thread(_begin, path, offset)
            if place is None:
                raise error(
                    "invalid_request",
                    f"offset is {offset}, and the log has {size} bytes; use at most that",
                    param="offset",
                )
            yield b""
            woken = asyncio.Event()
            with self._logs.watching(job.id, woken):
                async for events in self._follow(job.id, path, place, woken if follow else None):
                    yield events
        finally:
            self._count -= 1

    async def _follow(
        self, job_id: str, path: Path, place: int, woken: asyncio.Event | None
    ) -> AsyncIterator[bytes]:
        while True:
            if woken is not None:
                woken.clear()
            # Looked at before the file: what was written by then is found in it.
            row, is_written = self._store.get(job_id), self._logs.is_written(job_id)
            piece = await asyncio.to_thread(_read, path, place)
            if piece.events:
                yield piece.events
            if piece.is_end or row is None:
                return
            if piece.next != place:
                place = piece.next
            elif not row.active and is_written:
                if not await asyncio.to_thread(_has_end, path):
                    yield _sse(place, encode_event(_end_of(row), row.ended or 0.0))
                return
            elif woken is None:
                return
            else:
                try:
                    async with asyncio.timeout(COMMENT_INTERVAL_S):
                        await woken.wait()
                except TimeoutError:
                    yield b": still here\n\n"


def _begin(path: Path, offset: int) -> tuple[int | None, int]:
    """The first place between two lines at `offset` or behind it, None beyond the end; and the size."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if offset > size:
                return None, size
            if offset == 0:
                return 0, size
            file.seek(offset - 1)
            while data := file.read(PIECE_BYTES):
                newline = data.find(b"\n")
                if newline >= 0:
                    return file.tell() - len(data) + newline + 1, size
            return size, size
    except OSError:
        return (None if offset else 0), 0


def _read(path: Path, place: int) -> _Piece:
    """What is there of whole lines, up to about a piece."""
    start = place
    try:
        with open_regular(path) as file:
            file.seek(place)
            data = _whole_lines(file)
    except OSError:
        data = b""
    events = []
    # What is behind the last newline is nothing, or a piece of what is no event.
    for line in data.split(b"\n")[:-1]:
        place += len(line) + 1
        kind = _type_of(line)
        if kind in TYPES:
            events.append(_sse(place, line, kind))
        if kind in FINAL_TYPES:
            return _Piece(b"".join(events), place, True)
    return _Piece(b"".join(events), max(place, start + len(data)), False)


def _whole_lines(file: BinaryIO) -> bytes:
    data = file.read(PIECE_BYTES)
    while b"\n" not in data and len(data) <= TAIL_BYTES and (more := file.read(PIECE_BYTES)):
        data += more
    whole = data[: data.rfind(b"\n") + 1]
    # A line that is longer than any event is passed over in pieces.
    return data if not whole and len(data) > TAIL_BYTES else whole


def _has_end(path: Path) -> bool:
    """Whether the log's last line is a last event."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return False
    return len(lines) > 1 and _type_of(lines[-2]) in FINAL_TYPES


def _type_of(line: bytes) -> str:
    """What kind of event a line is; "" where it is none, as where somebody else wrote into the file."""
    if b"\r" in line:
        return ""  # to a reader of events it would be two lines
    try:
        return msgspec.json.decode(line, type=_Type).type
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


def _end_of(row: Job) -> Event:
    """The last event of a job, as its row has it."""
    match row.status:
        case "done":
            return Done(row.result or {})
        case "cancelled":
            return Cancelled(row.message)
        case "interrupted":
            return Interrupted(row.error or "")
        case _:
            return Failed(row.error or "")


def _sse(place: int, line: bytes, kind: str = "") -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % ((kind or _type_of(line)).encode(), place, line)
