"""Records that have files, by name and by what they stand behind, and how long the longest whole prefix is.

A prefix is whole up to a record's end if every slice up to there is on disk. That is kept up to date with
each file that comes or goes: a record whose own answer changes makes those right behind it doubtful, and so
on. As one lost record may stand before a hundred thousand, doubts are settled some at a time; until they are,
the length is that of a moment ago.

No lock and no disk: owned by ssd_index.py.
"""

from __future__ import annotations

import msgspec

from mlxpool.shared.kv.names import Kind
from mlxpool.worker.cache.records import Record


class Entry(msgspec.Struct):
    """One record. *_bytes: of its files, None where there is none. whole: whether all slices up to its end
    are there. touched_s: when its files' times were last set, in the clock of whoever sets them."""

    record: Record
    slice_bytes: int | None = None
    state_bytes: int | None = None
    whole: bool = False
    touched_s: float = float("-inf")

    def bytes_of(self, kind: Kind) -> int | None:
        return self.slice_bytes if kind == "slice" else self.state_bytes

    def set_bytes(self, kind: Kind, size: int | None) -> None:
        if kind == "slice":
            self.slice_bytes = size
        else:
            self.state_bytes = size

    @property
    def kinds(self) -> tuple[Kind, ...]:
        if self.slice_bytes is None:
            return () if self.state_bytes is None else ("state",)
        return ("slice",) if self.state_bytes is None else ("slice", "state")


class Files:
    """entries: by record's name. children: by parent, then by name, least recently used first, for a dict
    keeps the order in which keys came. count, bytes: of all files."""

    def __init__(self) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.children: dict[bytes, dict[bytes, Record]] = {}
        self.count = 0
        self.bytes = 0
        self._slices = 0
        self._whole_ends = _Ends()
        self._state_ends = _Ends()
        self._doubtful: list[bytes] = []

    def add(self, record: Record, kind: Kind, size_bytes: int) -> Entry:
        """A file, which makes its record the most recently used."""
        entry = self.entries.get(record.name)
        if entry is None:
            entry = self.entries[record.name] = Entry(record)
        held = entry.bytes_of(kind)
        entry.set_bytes(kind, size_bytes)
        self.bytes += size_bytes - (held or 0)
        if held is None:
            self._counted(entry, kind, 1)
        self.use(record)
        return entry

    def drop(self, record_name: bytes, kind: Kind) -> Entry | None:
        """A file that is not there any more; its record, None where it was not known."""
        entry = self.entries.get(record_name)
        if entry is None or (held := entry.bytes_of(kind)) is None:
            return None
        entry.set_bytes(kind, None)
        self.bytes -= held
        self._counted(entry, kind, -1)
        if not entry.kinds:
            del self.entries[record_name]
            siblings = self.children[entry.record.parent]
            del siblings[record_name]
            if not siblings:
                del self.children[entry.record.parent]
        return entry

    def use(self, record: Record) -> None:
        """A record that is there becomes the most recently used behind its parent."""
        siblings = self.children.setdefault(record.parent, {})
        siblings.pop(record.name, None)
        siblings[record.name] = record

    def _counted(self, entry: Entry, kind: Kind, by: int) -> None:
        self.count += by
        if kind == "slice":
            self._slices += by
            self._judge(entry)
        else:
            self._state_ends.change(entry.record.end, by)

    def _judge(self, entry: Entry) -> None:
        record = entry.record
        parent = self.entries.get(record.parent)
        whole = entry.slice_bytes is not None and (record.start == 0 or (parent is not None and parent.whole))
        if whole != entry.whole:
            entry.whole = whole
            self._whole_ends.change(record.end, 1 if whole else -1)
            self._doubtful.extend(self.children.get(record.name, ()))

    def settle(self, steps: int) -> bool:
        """Settles so many doubts; whether none is left."""
        while self._doubtful and steps:
            steps -= 1
            if (entry := self.entries.get(self._doubtful.pop())) is not None:
                self._judge(entry)
        return not self._doubtful

    @property
    def longest(self) -> int:
        """Tokens of the longest whole prefix; where there are no slices at all, the states say how long."""
        return (self._whole_ends if self._slices else self._state_ends).furthest


class _Ends:
    """How many records end where."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._furthest: int | None = 0

    def change(self, end: int, by: int) -> None:
        count = self._counts.get(end, 0) + by
        if count:
            self._counts[end] = count
            if self._furthest is not None:
                self._furthest = max(self._furthest, end)
        else:
            del self._counts[end]
            if end == self._furthest:
                # Not now: a conversation goes record by record.
                self._furthest = None

    @property
    def furthest(self) -> int:
        if self._furthest is None:
            self._furthest = max(self._counts, default=0)
        return self._furthest
