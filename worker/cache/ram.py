"""The records that are in memory: a trie of prefixes by their chained names, with a cap in bytes.

A record is held with its slice, its state or both, as arrays of its own or as views of an extent that
neighbours share. What is used moves to the recent end
with everything it stands on, the deepest first, so a record never goes before those that build on it. A short
slice goes when a longer one behind the same parent holds its tokens too.

Owned by the engine thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlxpool.shared.kv.names import Kind
from mlxpool.worker.cache.records import Ids, Record


class Extent:
    """Arrays that neighbouring slices are views of. tokens: their positions. held: how many of the slices the
    tier still has; the memory is free when it has none."""

    def __init__(self, arrays: dict[str, Any], tokens: int) -> None:
        self.arrays, self.tokens = arrays, tokens
        self.bytes: int = sum(array.nbytes for array in arrays.values())
        self.held = 0


class Part:
    """A slice or a state. arrays: by name, evaluated. scalars: what else a state is made of. fleeting: not
    worth writing to disk any more. extent, start: what the arrays are views of, and from which position."""

    def __init__(self, arrays: dict[str, Any], scalars: dict[str, list[int]] | None = None) -> None:
        self.arrays = arrays
        self.scalars = scalars or {}
        self.bytes: int = sum(array.nbytes for array in arrays.values())
        self.fleeting = False
        self.extent: Extent | None = None
        self.start = 0

    def move_into(self, extent: Extent, start: int, arrays: dict[str, Any]) -> None:
        """Let the arrays be views of the extent's; the tier holds the part already."""
        self.extent, self.start, self.arrays = extent, start, arrays
        extent.held += 1


class Held:
    """A record in memory. used_s: when it was last asked for."""

    def __init__(self, record: Record, ids: Ids, used_s: float) -> None:
        self.record, self.ids, self.used_s = record, ids, used_s
        self.parts: dict[Kind, Part] = {}


class Gone(NamedTuple):
    """A part that has left memory, or is about to."""

    record: Record
    ids: Ids
    kind: Kind
    part: Part


class RamTier:
    """See the module. max_bytes: the cap, kept by `evict`. clock: seconds."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.coming_bytes = 0  # of records that are being read from disk
        self._clock = clock
        self._held: OrderedDict[bytes, Held] = OrderedDict()  # least recently used first
        self._children: dict[bytes, dict[bytes, Record]] = {}

    def __len__(self) -> int:
        return len(self._held)

    # What is known, as `records.find` asks it

    def has_slice(self, record: bytes) -> bool:
        return self.part(record, "slice") is not None

    def has_state(self, record: bytes) -> bool:
        return self.part(record, "state") is not None

    def children(self, parent: bytes) -> Iterable[Record]:
        return reversed(self._children.get(parent, {}).values())

    def ids(self, record: Record) -> Ids | None:
        held = self._held.get(record.name)
        return None if held is None else held.ids

    def held(self, record: bytes) -> Held | None:
        """All that is held of a record."""
        return self._held.get(record)

    def part(self, record: bytes, kind: Kind) -> Part | None:
        held = self._held.get(record)
        return None if held is None else held.parts.get(kind)

    # Changes

    def add(self, record: Record, ids: Ids, kind: Kind, part: Part) -> None:
        """Hold a part; ids: the record's own. One that is held already stays as it is."""
        held = self._held.get(record.name)
        if held is None:
            held = self._held[record.name] = Held(record, ids.copy(), self._clock())
            self._children.setdefault(record.parent, {})[record.name] = record
        if kind in held.parts:
            return
        held.parts[kind] = part
        self.bytes += _joins(part)
        if kind == "slice":
            self._drop_covered(record, held.ids)

    def _drop_covered(self, record: Record, ids: Ids) -> None:
        """Shorter records behind the same parent whose tokens this one holds too."""
        for other in list(self._children[record.parent].values()):
            if other.end >= record.end or not self.has_slice(other.name):
                continue
            own = self._held[other.name].ids
            # The first token tells most of a thousand conversations apart.
            if own[0] == ids[0] and np.array_equal(own, ids[: len(own)]):
                self.drop(other, "slice")

    def touch(self, path: Sequence[Record]) -> None:
        """A prefix was used: its records, in order from the first."""
        now_s = self._clock()
        for record in reversed(path):
            held = self._held.get(record.name)
            if held is not None:
                held.used_s = now_s
                self._held.move_to_end(record.name)
                siblings = self._children[record.parent]
                siblings[record.name] = siblings.pop(record.name)

    def evict(self, room_bytes: int = 0) -> list[Gone]:
        """Make it fit, and so many bytes more beside what is on its way: the least recently used go."""
        gone: list[Gone] = []
        while self._held and self.bytes + self.coming_bytes + room_bytes > self.max_bytes:
            gone += self._remove(next(iter(self._held)))
        return gone

    def idle(self, since_s: float) -> Iterator[Gone]:
        """What was last used before that, oldest first. Nothing may change meanwhile."""
        for held in self._held.values():
            if held.used_s >= since_s:
                return
            for kind, part in held.parts.items():
                yield Gone(held.record, held.ids, kind, part)

    def drop(self, record: Record, kind: Kind) -> None:
        """Let go of one part."""
        held = self._held.get(record.name)
        if held is None or kind not in held.parts:
            return
        self.bytes -= _leaves(held.parts.pop(kind))
        if not held.parts:
            self._forget(record.name)

    def parts(self) -> Iterator[Gone]:
        """All that is held, least recently used first."""
        for held in self._held.values():
            for kind, part in held.parts.items():
                yield Gone(held.record, held.ids, kind, part)

    def _remove(self, record: bytes) -> list[Gone]:
        held = self._held[record]
        gone = [Gone(held.record, held.ids, kind, part) for kind, part in held.parts.items()]
        self.bytes -= sum(_leaves(part) for part in held.parts.values())
        self._forget(record)
        return gone

    def _forget(self, record: bytes) -> None:
        held = self._held.pop(record)
        siblings = self._children[held.record.parent]
        del siblings[record]
        if not siblings:
            del self._children[held.record.parent]


def _joins(part: Part) -> int:
    """What the tier holds more with this part. Bytes."""
    extent = part.extent
    if extent is None:
        return part.bytes
    extent.held += 1
    return extent.bytes if extent.held == 1 else 0


def _leaves(part: Part) -> int:
    """What the tier holds less without this part. Bytes."""
    extent = part.extent
    if extent is None:
        return part.bytes
    extent.held -= 1
    return 0 if extent.held else extent.bytes
