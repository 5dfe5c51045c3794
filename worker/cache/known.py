"""All records there are, wherever they are: what `records.find` asks.

Owned by the engine thread; the writer's thread takes out of the queue meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mlxpool.worker.cache.ram import Gone, Part, RamTier
from mlxpool.worker.cache.records import Ids, Kind, Piece, Record
from mlxpool.worker.cache.ssd import SsdTier


class Known:
    """Memory, what has left it and waits to be written, and disk, in this order."""

    def __init__(self, ram: RamTier, queued: Mapping[Piece, Gone], tier: SsdTier | None) -> None:
        self._ram, self._queued, self._tier = ram, queued, tier

    def part(self, piece: Piece) -> Part | None:
        """None where only the disk has it, or nobody."""
        held = self._ram.part(piece.record.name, piece.kind)
        if held is None and (gone := self._queued.get(piece)) is not None:
            return gone.part
        return held

    def has_slice(self, name: bytes) -> bool:
        return self._ram.has_slice(name) or self._elsewhere(name, "slice")

    def has_state(self, name: bytes) -> bool:
        return self._ram.has_state(name) or self._elsewhere(name, "state")

    def _elsewhere(self, name: bytes, kind: Kind) -> bool:
        if any(piece.record.name == name and piece.kind == kind for piece in list(self._queued)):
            return True
        if self._tier is None:
            return False
        return self._tier.has_slice(name) if kind == "slice" else self._tier.has_state(name)

    def children(self, parent: bytes) -> Iterable[Record]:
        seen = set()
        queued = [piece.record for piece in list(self._queued) if piece.record.parent == parent]
        on_disk = () if self._tier is None else self._tier.children(parent)
        for record in (*self._ram.children(parent), *queued, *on_disk):
            if record.name not in seen:
                seen.add(record.name)
                yield record

    def ids(self, record: Record) -> Ids | None:
        if (held := self._ram.ids(record)) is not None:
            return held
        for gone in list(self._queued.values()):
            if gone.record.name == record.name:
                return gone.ids
        return None if self._tier is None else self._tier.ids(record)
