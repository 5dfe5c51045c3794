"""The prompt cache's tier on disk, of one model: which records there are, reading them back, and their ages.

The files are the index. `open` lists them, and from then on the index follows what this process writes and
deletes; other processes delete too, which shows as a file that isn't there: a miss like any other. Whatever
is wrong with a file, it is a miss, and the file goes. Nothing here raises for the state of a disk.

Asked by the engine's thread, told by the writer's (writer.py), used by the threads it owns: those that read,
and one that does what nobody waits for. The engine's thread never waits for the lock on the disk's budget,
which another process may hold. Index and budget each have their own lock. A third one is held where the index
is made to say what the folder says of one file: who changes the folder does so after the change, so the last
one to look has seen the last change.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mlxpool.shared.kv import folder as kv_folder
from mlxpool.shared.kv.budget import Budget
from mlxpool.shared.kv.listing import Stored, records_in
from mlxpool.shared.kv.names import Kind, file_name
from mlxpool.shared.kv.record_file import Verdict, open_record, read_head, verdict_on
from mlxpool.worker.cache.fingerprint import Fingerprint
from mlxpool.worker.cache.records import Ids, Piece, Record
from mlxpool.worker.cache.ssd_index import Index
from mlxpool.worker.cache.ssd_reading import Reading, file_of, ids_of

__all__ = ["MAX_HEADS_PER_PARENT", "READ_THREADS", "TOUCH_INTERVAL_S", "Piece", "Reading", "SsdTier"]

# Reads in flight: past four an SSD gains nothing that the copies into memory don't eat up.
READ_THREADS = 4

# A record's own tokens are asked for where prefixes part; behind one parent a few are worth opening a file.
MAX_HEADS_PER_PARENT = 8

# Ages tell what was used this hour from what was used yesterday; setting them costs a write of the disk's.
TOUCH_INTERVAL_S = 60.0


class SsdTier:
    """off: why nothing is written just now, None while all is well; set by `open` and by the writer.

    restores, restore_ms, restore_ms_last, restored_bytes: readings that brought something. rejected: files
    that were not what they should be.
    """

    def __init__(
        self,
        root: Path,
        fingerprint: Fingerprint,
        model: str,
        max_bytes: int,
        verify: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_bytes = max_bytes
        self.budget = Budget(root, max_bytes)
        self.fingerprint = fingerprint
        self.folder = root / fingerprint.hash
        self.off: str | None = None
        self.restores = 0
        self.restore_ms_last = self.restore_ms = 0.0
        self.restored_bytes = 0
        self.rejected = 0
        self._about = kv_folder.About(model, fingerprint.hash, fingerprint.about)
        self._verify = verify
        self._clock = clock
        self._index = Index()
        self._counting = threading.Lock()
        self._agreeing = threading.Lock()
        self._readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="kv-read")
        # Its own: what waits for the budget's lock must not keep a restore waiting.
        self._tidying = ThreadPoolExecutor(1, thread_name_prefix="kv-tidy")

    def open(self) -> None:
        """Lists the model's files: names, sizes and ages only. A folder that can't be used sets `off`."""
        self.off = None
        try:
            found = records_in(self.budget.root, self.fingerprint.hash)
            _check_writable(self.folder)
        except OSError as problem:
            self.off = f"{self.folder}: {problem.strerror or problem}"
            found = []
        found.sort(key=lambda stored: (stored.used_s, -stored.file.start))
        self._index.replace([(_record(stored), stored.file.kind, stored.bytes) for stored in found])
        if found:
            # A model may have a new name, and one that only reads must say so too: else a prune takes it all.
            self._tidy(self._describe)

    def _describe(self) -> None:
        with contextlib.suppress(OSError):
            self.describe()

    def close(self) -> None:
        """Lets its threads end; what they have to do is done first."""
        self._readers.shutdown(wait=False)
        self._tidying.shutdown(wait=False)

    @property
    def entries(self) -> int:
        """Files."""
        return self._index.entries

    @property
    def longest_prefix_tokens(self) -> int:
        """Of a prefix whose records are all there, at a moment not long ago."""
        return self._index.longest()

    def has(self, piece: Piece) -> bool:
        return self._index.has(piece.record.name, piece.kind)

    def has_slice(self, name: bytes) -> bool:
        return self._index.has(name, "slice")

    def has_state(self, name: bytes) -> bool:
        return self._index.has(name, "state")

    def children(self, parent: bytes) -> Sequence[Record]:
        """Records that begin where this one ends, most recently used first."""
        return self._index.children(parent)

    def ids(self, record: Record) -> Ids | None:
        """A record's own tokens, None where they are not known: its file is opened if it is one of the
        MAX_HEADS_PER_PARENT most recently used behind its parent, and what it says is remembered."""
        known = self._index.ids(record.name)
        if known is not None or not self._index.is_among_newest(record, MAX_HEADS_PER_PARENT):
            return known
        for kind in self._index.kinds(record.name):
            ids = self._read_ids(Piece(record, kind))
            if ids is not None:
                return ids
        return None

    def _read_ids(self, piece: Piece) -> Ids | None:
        try:
            descriptor = open_record(self.path(piece))
            try:
                ids = ids_of(read_head(descriptor, file_of(piece), self.fingerprint.hash))
            finally:
                os.close(descriptor)
        except Exception as problem:
            self._index.drop(piece.record.name, piece.kind)
            if (verdict := verdict_on(problem)) == "delete":
                self._tidy(partial(self._reject, piece, verdict))
            return None
        self._index.remember(piece.record.name, ids)
        return ids

    def path(self, piece: Piece) -> Path:
        """Where a piece's file is, if it is anywhere."""
        return self.folder / file_name(file_of(piece))

    def begin(self, pieces: Sequence[Piece], wake: Callable[[], None]) -> Reading:
        """Starts to read these back. wake is called by a reader thread when the arrays are to be made, and at
        the end; both may be before this returns."""
        return Reading(
            self.folder,
            self.fingerprint.hash,
            pieces,
            wake,
            check=self._verify,
            submit=self._submit,
            reject=self._reject,
            ended=self._ended,
        )

    def touch(self, records: Sequence[Record]) -> None:
        """Marks a path, in order from its first record, as used just now; the files' times follow soon."""
        due = self._index.touch(records, self._clock(), TOUCH_INTERVAL_S)
        if due:
            self._tidy(partial(self._set_times, due, time.time_ns()))

    def _set_times(self, due: Sequence[tuple[Record, Kind]], now_ns: int) -> None:
        for record, kind in due:
            with contextlib.suppress(OSError):
                os.utime(self.path(Piece(record, kind)), ns=(now_ns, now_ns), follow_symlinks=False)

    def delete(self, piece: Piece) -> None:
        """A piece that is of no use: it is no longer known, and its file goes soon."""
        if self._index.drop(piece.record.name, piece.kind):
            self._tidy(partial(self._unlink, piece))

    def _unlink(self, piece: Piece) -> None:
        self.budget.remove(self.path(piece))
        # It may have been written again meanwhile, before the file went or after.
        self._forget_if_gone(piece)

    def _forget_if_gone(self, piece: Piece) -> None:
        with self._agreeing:
            if not os.path.lexists(self.path(piece)):
                self._index.drop(piece.record.name, piece.kind)

    def describe(self) -> None:
        """Says in the model's folder whose it is, if it doesn't by now. Raises OSError."""
        kv_folder.describe(self.budget, self._about)

    def wrote(self, piece: Piece, ids: Ids, size_bytes: int) -> None:
        """A file that has its name by now. Shorter records that it makes useless go. The writer's thread."""
        with self._agreeing:
            if not os.path.lexists(self.path(piece)):
                return
            self._index.add(piece.record, piece.kind, size_bytes, ids, self._clock())
        if piece.kind == "slice":
            for shorter in self._index.covered_by(piece.record, ids):
                self._index.drop(shorter.name, "slice")
                self._unlink(Piece(shorter, "slice"))

    def evicted(self, gone: Sequence[Stored]) -> None:
        """Files that were deleted to make room."""
        for stored in gone:
            if stored.folder == self.fingerprint.hash:
                self._index.drop(stored.file.name, stored.file.kind)

    def recheck(self) -> None:
        """Forgets what other processes have deleted meanwhile: before it is said what is durable. Blocks: for
        an executor's thread."""
        # Before the folder is listed: what is written from here on is not looked for in an older list.
        pieces = self._index.pieces()
        try:
            there = set(os.listdir(self.folder))
        except FileNotFoundError:
            there = set()
        except OSError:
            return
        for piece in pieces:
            if file_name(file_of(piece)) not in there:
                self._forget_if_gone(piece)
        self._index.settle()

    def _reject(self, piece: Piece, verdict: Verdict) -> None:
        """By a thread that may wait for the budget's lock."""
        self._index.drop(piece.record.name, piece.kind)
        if verdict == "delete":
            with self._counting:
                self.rejected += 1
            self._unlink(piece)

    def _ended(self, reading: Reading) -> None:
        if not reading.cancelled and reading.bytes:
            with self._counting:
                self.restores += 1
                self.restored_bytes += reading.bytes
                self.restore_ms_last = reading.elapsed_ms
                self.restore_ms += reading.elapsed_ms

    def _submit(self, job: Callable[[], None]) -> None:
        _do(self._readers, job)

    def _tidy(self, job: Callable[[], None]) -> None:
        _do(self._tidying, job)

    # Last, because it hides the type of the same name.
    @property
    def bytes(self) -> int:
        """What this model's records take, in whole blocks."""
        return self._index.bytes


def _do(executor: ThreadPoolExecutor, job: Callable[[], None]) -> None:
    try:
        executor.submit(job)
    except RuntimeError:
        # Closed: a reading still comes to its end, on the thread that asks.
        job()


def _record(stored: Stored) -> Record:
    file = stored.file
    return Record(file.name, file.parent, file.start, file.end)


def _check_writable(folder: Path) -> None:
    """Raises OSError where files can't be made in the folder, or the folder itself can't."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise NotADirectoryError(0, "not a folder", str(nearest))
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(0, "not permitted", str(nearest))
