"""Which records are on disk, as far as this process knows: what names say, and what it wrote itself.

It may be wrong in one way only: another process may have deleted a file. Whoever then finds it missing says
so with `drop`. Nothing here touches a disk.

Used by any thread: one lock guards all of it and is never held for longer than one question, which costs a
few milliseconds at the most, however much there is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from mlxpool.shared.kv.names import Kind
from mlxpool.worker.cache.records import Ids, Piece, Record, name
from mlxpool.worker.cache.ssd_files import Files

# Own tokens that are remembered, a kilobyte each: those of the records that conversations end in.
_MAX_REMEMBERED = 4096

# Doubts about whole prefixes settled at a time: a millisecond.
_DOUBTS_AT_ONCE = 1000


class Index:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files = Files()
        self._ids: OrderedDict[bytes, Ids] = OrderedDict()

    @property
    def entries(self) -> int:
        """Files."""
        return self._files.count

    def replace(self, found: Sequence[tuple[Record, Kind, int]]) -> None:
        """Holds exactly these, least recently used first, with the bytes of each."""
        files = Files()
        for record, kind, size in found:
            files.add(record, kind, size)
        files.settle(len(found))
        with self._lock:
            self._files = files

    def add(self, record: Record, kind: Kind, size_bytes: int, ids: Ids, now_s: float) -> None:
        """A file that was written just now."""
        with self._lock:
            entry = self._files.add(record, kind, size_bytes)
            entry.touched_s = now_s
            self._remember(record.name, ids)
            self._files.settle(_DOUBTS_AT_ONCE)

    def drop(self, record_name: bytes, kind: Kind) -> bool:
        """Forgets a file; whether it was known."""
        with self._lock:
            entry = self._files.drop(record_name, kind)
            if entry is not None and not entry.kinds:
                self._ids.pop(record_name, None)
            self._files.settle(_DOUBTS_AT_ONCE)
            return entry is not None

    def has(self, record_name: bytes, kind: Kind) -> bool:
        with self._lock:
            entry = self._files.entries.get(record_name)
            return entry is not None and entry.bytes_of(kind) is not None

    def children(self, parent: bytes) -> list[Record]:
        """Records that begin where this one ends, most recently used first."""
        with self._lock:
            return list(reversed(self._files.children.get(parent, {}).values()))

    def is_among_newest(self, record: Record, count: int) -> bool:
        """Whether it is one of the `count` most recently used behind its parent."""
        with self._lock:
            return record.name in islice(reversed(self._files.children.get(record.parent, {})), count)

    def kinds(self, record_name: bytes) -> tuple[Kind, ...]:
        with self._lock:
            entry = self._files.entries.get(record_name)
            return () if entry is None else entry.kinds

    def pieces(self) -> list[Piece]:
        """All of it."""
        with self._lock:
            entries = list(self._files.entries.values())
        return [Piece(entry.record, kind) for entry in entries for kind in entry.kinds]

    def ids(self, record_name: bytes) -> Ids | None:
        """A record's own tokens where they are remembered."""
        with self._lock:
            ids = self._ids.get(record_name)
            if ids is not None:
                self._ids.move_to_end(record_name)
            return ids

    def remember(self, record_name: bytes, ids: Ids) -> None:
        with self._lock:
            if record_name in self._files.entries:
                self._remember(record_name, ids)

    def _remember(self, record_name: bytes, ids: Ids) -> None:
        self._ids[record_name] = np.array(ids, dtype=np.uint32)
        self._ids.move_to_end(record_name)
        if len(self._ids) > _MAX_REMEMBERED:
            self._ids.popitem(last=False)

    def covered_by(self, record: Record, ids: Ids) -> list[Record]:
        """Shorter records behind the same parent whose slices say nothing that this record's doesn't: its
        tokens begin with theirs."""
        names: dict[int, bytes] = {}
        covered = []
        for sibling in self.children(record.parent):
            if sibling.end >= record.end:
                continue
            length = sibling.end - sibling.start
            if length not in names:
                names[length] = name(record.parent, ids[:length])
            if names[length] == sibling.name and self.has(sibling.name, "slice"):
                covered.append(sibling)
        return covered

    def touch(self, records: Sequence[Record], now_s: float, every_s: float) -> list[tuple[Record, Kind]]:
        """Marks a path, in order, as used; the files whose times are to be set for it.

        A record's time is set at most once in `every_s`, and then those of all before it too, so that none is
        older than what needs it. States further up are not what was used.
        """
        due: list[tuple[Record, Kind]] = []
        with self._lock:
            late = False
            for place, record in reversed(list(enumerate(records))):
                entry = self._files.entries.get(record.name)
                if entry is None:
                    continue
                late = late or now_s - entry.touched_s >= every_s
                self._files.use(record)
                if not late:
                    continue
                entry.touched_s = now_s
                last = place == len(records) - 1
                due += [(record, kind) for kind in entry.kinds if last or kind == "slice"]
        return due[::-1]

    def longest(self) -> int:
        """Tokens of the longest prefix that is whole, at a moment not long ago."""
        with self._lock:
            self._files.settle(_DOUBTS_AT_ONCE)
            return self._files.longest

    def settle(self) -> None:
        """Makes `longest` that of now."""
        settled = False
        while not settled:
            with self._lock:
                settled = self._files.settle(_DOUBTS_AT_ONCE)

    # Last, because it hides the type of the same name.
    @property
    def bytes(self) -> int:
        """Of all files."""
        return self._files.bytes
