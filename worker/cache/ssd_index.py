"""Which records are on disk, as far as this process knows: what names say, and what it wrote itself.

It may be wrong in one way only: another process may have deleted a file. Whoever then finds it missing says
so with `drop`. Nothing here touches a disk.

Used by any thread: one lock guards all of it and is never held for longer than one question.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from mlxpool.shared.kv.names import Kind
from mlxpool.worker.cache.records import Ids, Record, name

# Own tokens that are remembered, a kilobyte each: those of the records that conversations end in.
_MAX_REMEMBERED = 4096


class Entry(msgspec.Struct):
    """One record. *_bytes: of its files, None where there is none. touched_s: when its files' times were last
    set, in the clock of whoever sets them."""

    record: Record
    slice_bytes: int | None = None
    state_bytes: int | None = None
    touched_s: float = float("-inf")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        held: list[Kind] = []
        if self.slice_bytes is not None:
            held.append("slice")
        if self.state_bytes is not None:
            held.append("state")
        return tuple(held)


class Index:
    """entries: files. bytes: of all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[bytes, Entry] = {}
        # By parent, least recently used first: a dict keeps the order in which keys came.
        self._children: dict[bytes, dict[bytes, Record]] = {}
        self._ids: OrderedDict[bytes, Ids] = OrderedDict()
        self._longest: int | None = 0
        self.entries = 0
        self.bytes = 0

    def replace(self, found: Sequence[tuple[Record, Kind, int]]) -> None:
        """Holds exactly these, least recently used first, with the bytes of each."""
        with self._lock:
            self._entries, self._children = {}, {}
            self._longest, self.entries, self.bytes = None, 0, 0
            for record, kind, size in found:
                self._add(record, kind, size)

    def add(self, record: Record, kind: Kind, size_bytes: int, ids: Ids, now_s: float) -> None:
        """A file that was written just now."""
        with self._lock:
            entry = self._add(record, kind, size_bytes)
            entry.touched_s = now_s
            self._remember(record.name, ids)

    def _add(self, record: Record, kind: Kind, size_bytes: int) -> Entry:
        entry = self._entries.get(record.name)
        if entry is None:
            entry = self._entries[record.name] = Entry(record)
        held = entry.slice_bytes if kind == "slice" else entry.state_bytes
        self.entries += held is None
        self.bytes += size_bytes - (held or 0)
        if kind == "slice":
            entry.slice_bytes = size_bytes
        else:
            entry.state_bytes = size_bytes
        self._newest(record)
        self._longest = None
        return entry

    def drop(self, record_name: bytes, kind: Kind) -> bool:
        """Forgets a file; whether it was known."""
        with self._lock:
            entry = self._entries.get(record_name)
            if entry is None or kind not in entry.kinds:
                return False
            self.bytes -= (entry.slice_bytes if kind == "slice" else entry.state_bytes) or 0
            self.entries -= 1
            self._longest = None
            if kind == "slice":
                entry.slice_bytes = None
            else:
                entry.state_bytes = None
            if not entry.kinds:
                del self._entries[record_name]
                siblings = self._children[entry.record.parent]
                del siblings[record_name]
                if not siblings:
                    del self._children[entry.record.parent]
                self._ids.pop(record_name, None)
            return True

    def has(self, record_name: bytes, kind: Kind) -> bool:
        with self._lock:
            entry = self._entries.get(record_name)
            return entry is not None and kind in entry.kinds

    def children(self, parent: bytes) -> list[Record]:
        """Records that begin where this one ends, most recently used first."""
        with self._lock:
            return list(reversed(self._children.get(parent, {}).values()))

    def is_among_newest(self, record: Record, count: int) -> bool:
        """Whether it is one of the `count` most recently used behind its parent."""
        with self._lock:
            siblings = self._children.get(record.parent, {})
            return any(own == record.name for own, _ in zip(reversed(siblings), range(count), strict=False))

    def kinds(self, record_name: bytes) -> tuple[Kind, ...]:
        with self._lock:
            entry = self._entries.get(record_name)
            return () if entry is None else entry.kinds

    def files(self) -> list[tuple[bytes, Kind]]:
        """All of it, by record and kind."""
        with self._lock:
            return [(own, kind) for own, entry in self._entries.items() for kind in entry.kinds]

    def ids(self, record_name: bytes) -> Ids | None:
        """A record's own tokens where they are remembered."""
        with self._lock:
            ids = self._ids.get(record_name)
            if ids is not None:
                self._ids.move_to_end(record_name)
            return ids

    def remember(self, record_name: bytes, ids: Ids) -> None:
        with self._lock:
            if record_name in self._entries:
                self._remember(record_name, ids)

    def _remember(self, record_name: bytes, ids: Ids) -> None:
        self._ids[record_name] = np.array(ids, dtype=np.uint32)
        self._ids.move_to_end(record_name)
        if len(self._ids) > _MAX_REMEMBERED:
            self._ids.popitem(last=False)

    def covered_by(self, record: Record, ids: Ids) -> list[Record]:
        """Shorter records behind the same parent whose slices say nothing that this record's doesn't: its
        tokens begin with theirs."""
        with self._lock:
            shorter = [
                sibling
                for sibling in self._children.get(record.parent, {}).values()
                if sibling.end < record.end and self._entries[sibling.name].slice_bytes is not None
            ]
        names: dict[int, bytes] = {}
        covered = []
        for sibling in shorter:
            length = sibling.end - sibling.start
            if length not in names:
                names[length] = name(record.parent, ids[:length])
            if names[length] == sibling.name:
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
                entry = self._entries.get(record.name)
                if entry is None:
                    continue
                late = late or now_s - entry.touched_s >= every_s
                self._newest(record)
                if not late:
                    continue
                entry.touched_s = now_s
                last = place == len(records) - 1
                due += [(record, kind) for kind in entry.kinds if last or kind == "slice"]
        return due[::-1]

    def _newest(self, record: Record) -> None:
        siblings = self._children.setdefault(record.parent, {})
        siblings.pop(record.name, None)
        siblings[record.name] = record

    def longest(self) -> int:
        """Tokens of the longest prefix that is whole: all slices up to its end; where there are no slices at
        all, the states say how long it is."""
        with self._lock:
            if self._longest is None:
                self._longest = self._measure()
            return self._longest

    def _measure(self) -> int:
        ordered = sorted(self._entries.values(), key=lambda entry: entry.record.start)
        if all(entry.slice_bytes is None for entry in ordered):
            return max((entry.record.end for entry in ordered), default=0)
        whole: set[bytes] = set()
        longest = 0
        for entry in ordered:
            if entry.slice_bytes is not None and (entry.record.start == 0 or entry.record.parent in whole):
                whole.add(entry.record.name)
                longest = max(longest, entry.record.end)
        return longest
