"""All records there are, wherever they are: what `records.find` asks.

Owned by the engine thread; the writer's thread takes out of the queue meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.shared.kv.names import Kind
from mlxpool.worker.cache.ram import Gone, Part, RamTier
from mlxpool.worker.cache.records import KINDS, Ids, Piece, Record
from mlxpool.worker.cache.ssd import SsdTier

# What waits to be written, by a record's name and which part of it.
Queued = dict[tuple[bytes, Kind], Gone]


class Known:
    """Memory, what has left it and waits to be written, and disk, in this order."""

    def __init__(self, ram: RamTier, queued: Queued, tier: SsdTier | None) -> None:
        self._ram, self._queued, self._tier = ram, queued, tier

    def part(self, piece: Piece) -> Part | None:
        """None where only the disk has it, or nobody."""
        held = self._ram.part(piece.record.name, piece.kind)
        if held is None and (gone := self._queued.get((piece.record.name, piece.kind))) is not None:
            return gone.part
        return held

    def has_slice(self, name: bytes) -> bool:
        return (
            self._ram.has_slice(name)
            or (name, "slice") in self._queued
            or (self._tier is not None and self._tier.has_slice(name))
        )

    def has_state(self, name: bytes) -> bool:
        return (
            self._ram.has_state(name)
            or (name, "state") in self._queued
            or (self._tier is not None and self._tier.has_state(name))
        )

    def children(self, parent: bytes) -> Iterable[Record]:
        seen = set()
        queued = [gone.record for gone in list(self._queued.values()) if gone.record.parent == parent]
        on_disk = () if self._tier is None else self._tier.children(parent)
        for record in (*self._ram.children(parent), *queued, *on_disk):
            if record.name not in seen:
                seen.add(record.name)
                yield record

    def ids(self, record: Record) -> Ids | None:
        if (held := self._ram.ids(record)) is not None:
            return held
        for kind in KINDS:
            if (gone := self._queued.get((record.name, kind))) is not None:
                return gone.ids
        return None if self._tier is None else self._tier.ids(record)
