"""One restore from disk: pieces of records, read by several threads straight into memory that MLX owns.

First all heads are opened and checked; they say what to allocate. Who asked is woken, makes the arrays on its
own thread and hands in their buffers; then the data are read into them, several reads in flight, each hash
checked by the thread that read the bytes. What is wrong with a file is known by the end and never raised: the
piece is in `bad`, its file is gone, and what its buffers hold means nothing.

Files are opened once for their heads and again for their data, so that a restore of any length holds few
descriptors; a file that is another one by then is bad.

Owned by who began it, who calls `fill` and `cancel` and reads; the reader threads change it under its lock.
Buffers are let go of at the end only: memory that a thread may still write to is never freed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mlxpool.shared.kv.names import FileName, file_name
from mlxpool.shared.kv.record_file import (
    Head,
    RecordError,
    Verdict,
    groups,
    open_record,
    read_data,
    read_head,
    verdict_on,
)
from mlxpool.worker.cache.records import Ids, Piece, name

Phase = Literal["heads", "allocate", "data", "done"]


def file_of(piece: Piece) -> FileName:
    """What a piece's file is called by."""
    record = piece.record
    return FileName(record.name, record.parent, record.start, record.end, piece.kind)


def flat(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, without a copy. Raises ValueError where that can't be."""
    if not array.flags.c_contiguous:
        raise ValueError("not contiguous")
    return array.reshape(-1).view(np.uint8).data


def ids_of(head: Head) -> Ids:
    """A record's own tokens. Raises RecordError where its name is not made of them."""
    ids = np.array(head.ids, dtype=np.uint32)
    if name(head.file.parent, ids) != head.file.name:
        raise RecordError("its tokens are another record's")
    return ids


class Reading:
    """phase: heads → allocate → data → done; `wake` is called when it becomes allocate and when it is done.

    heads: of the pieces that are good so far. bad: pieces that can't be used. progress: grows with every
    step. bytes: of data read. elapsed_ms: from the beginning to the end, the time to allocate included.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        pieces: Sequence[Piece],
        wake: Callable[[], None],
        *,
        check: bool,
        submit: Callable[[Callable[[], None]], None],
        reject: Callable[[Piece, Verdict], None],
        ended: Callable[[Reading], None],
    ) -> None:
        self.phase: Phase = "heads"
        self.heads: dict[Piece, Head] = {}
        self.bad: set[Piece] = set()
        self.progress = 0
        self.bytes = 0
        self.elapsed_ms = 0.0
        self.cancelled = False
        self._folder = folder
        self._fingerprint = fingerprint
        self._wake = wake
        self._check = check
        self._submit = submit
        self._reject = reject
        self._ended = ended
        self._lock = threading.Lock()
        self._identity: dict[Piece, tuple[int, int, int]] = {}
        self._buffers: dict[Piece, dict[str, memoryview]] = {}
        self._begun = time.perf_counter()
        self._run([partial(self._read_head, piece) for piece in dict.fromkeys(pieces)])

    def fill(self, buffers: Iterable[tuple[Piece, Mapping[str, npt.NDArray[Any]]]]) -> None:
        """Reads the data of these pieces into writable, contiguous arrays of their tensors' sizes.

        What comes first is read while the next is made ready. Pieces left out are not read. One whose arrays
        don't fit is bad. Does nothing in any other phase. Raises what the iteration raises; what has been
        handed over by then is still read.
        """
        with self._lock:
            if self.phase != "allocate":
                return
            self.phase = "data"
            self._left = 1  # this call, so that the end is not before the last piece
        try:
            for piece, arrays in buffers:
                self._read_piece(piece, arrays)
        finally:
            self._one(lambda: None)

    def _read_piece(self, piece: Piece, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        head = self.heads.get(piece)
        if head is None:
            return
        fitting = _fitting(head, arrays)
        if fitting is None:
            self._fail(piece, "forget")
            return
        self._buffers[piece] = fitting
        jobs = [partial(self._read_data, piece, names) for names in groups(head)]
        with self._lock:
            self._left += len(jobs)
        for job in jobs:
            self._submit(partial(self._one, job))

    def cancel(self) -> None:
        """Ends it as soon as no thread reads any more; it is done then, as always."""
        with self._lock:
            self.cancelled = True
            if self.phase != "allocate":
                return
            self.phase = "data"
        self._run([])

    def _run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Has the jobs done by the reader threads, then goes on to the next phase, on one of them."""
        self._left = max(len(jobs), 1)
        for job in jobs or [lambda: None]:
            self._submit(partial(self._one, job))

    def _one(self, job: Callable[[], None]) -> None:
        try:
            if not self.cancelled:
                job()
        finally:
            with self._lock:
                self.progress += 1
                self._left -= 1
                last = self._left == 0
            if last:
                self._advance()

    def _advance(self) -> None:
        with self._lock:
            done = self.phase != "heads" or not self.heads or self.cancelled
            if done:
                self._buffers = {}
                self.elapsed_ms = (time.perf_counter() - self._begun) * 1000
            self.phase = "done" if done else "allocate"
        if done:
            self._ended(self)
        # Who is woken may be gone by now; a reader thread must outlive it.
        with contextlib.suppress(Exception):
            self._wake()

    def _read_head(self, piece: Piece) -> None:
        with self._judged(piece):
            descriptor = open_record(self._path(piece))
            try:
                head = read_head(descriptor, file_of(piece), self._fingerprint)
                identity = _identity(descriptor)
            finally:
                os.close(descriptor)
            ids_of(head)
            with self._lock:
                self.heads[piece] = head
                self._identity[piece] = identity

    def _read_data(self, piece: Piece, names: Sequence[str]) -> None:
        if piece in self.bad:
            return
        with self._judged(piece):
            descriptor = open_record(self._path(piece))
            try:
                if _identity(descriptor) != self._identity[piece]:
                    raise RecordError("another file since its head was read")
                count = read_data(descriptor, self.heads[piece], names, self._buffers[piece], self._check)
            finally:
                os.close(descriptor)
            with self._lock:
                self.bytes += count

    @contextlib.contextmanager
    def _judged(self, piece: Piece) -> Iterator[None]:
        try:
            yield
        except Exception as problem:
            self._fail(piece, verdict_on(problem))

    def _fail(self, piece: Piece, verdict: Verdict) -> None:
        with self._lock:
            if piece in self.bad:
                return
            self.bad.add(piece)
        self._reject(piece, verdict)

    def _path(self, piece: Piece) -> Path:
        return self._folder / file_name(file_of(piece))


def _fitting(head: Head, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, memoryview] | None:
    """The arrays' bytes if they are just what the head describes."""
    if arrays.keys() != head.tensors.keys():
        return None
    views = {}
    for tensor, array in arrays.items():
        if array.nbytes != head.tensors[tensor].bytes or not array.flags.writeable:
            return None
        try:
            views[tensor] = flat(array)
        except ValueError:
            return None
    return views


def _identity(descriptor: int) -> tuple[int, int, int]:
    """What tells a file from another one of the same name."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size
