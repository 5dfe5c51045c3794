"""One prompt's prefix on its way into caches: out of memory at once, from disk in between turns.

What has to be read is read by other threads, straight into arrays that are made here; where files turn out
bad a shorter prefix is looked for. Engine thread only.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxpool.worker.cache.layers_kinds import Unfit
from mlxpool.worker.cache.layers_memory import alias, dtype_of, empty
from mlxpool.worker.cache.ram import Part
from mlxpool.worker.cache.records import Found, Ids, Piece
from mlxpool.worker.cache.ssd_reading import Reading

if TYPE_CHECKING:
    from mlxpool.worker.cache.prompt_cache import PromptCache

# Each time that files turn out bad a shorter prefix is looked for.
_TRIES = 4


class Restore:
    """`advance` until `ready`; then `caches` hold `length` tokens of the prompt, 0 for none."""

    def __init__(self, cache: PromptCache, ids: Ids, namespace: str) -> None:
        self.length = 0
        self.caches: list[Any] | None = None
        self.ready = False
        self._cache, self._ids, self._namespace = cache, ids, namespace
        self._found: Found | None = None
        self._parts: dict[Piece, Part] = {}
        self._reading: Reading | None = None
        self._tries = 0
        self._coming_bytes = 0
        try:
            self._begin()
        except Exception:
            traceback.print_exc()
            self.cancel()

    def _begin(self) -> None:
        self._tries += 1
        cache = self._cache
        self._found = found = cache.find(self._ids, self._namespace) if self._tries <= _TRIES else None
        if found is None:
            self.ready = True
            return
        pieces = [Piece(record, "slice") for record in found.records]
        if found.state is not None:
            pieces.append(Piece(found.state, "state"))
        # Held from here on, whatever leaves memory meanwhile.
        self._parts = {piece: part for piece in pieces if (part := cache.known.part(piece)) is not None}
        missing = [piece for piece in pieces if piece not in self._parts]
        if missing:
            assert cache.tier is not None
            self._reading = cache.tier.begin(missing, cache.wake)
            cache.readings.append(self._reading)
        self.advance()

    def advance(self) -> None:
        """Go on as far as is possible now."""
        reading = self._reading
        if self.ready:
            return
        try:
            if reading is not None and reading.phase == "allocate":
                self._allocate(reading)
            if reading is None or reading.phase == "done":
                self._finish(reading)
        except Exception:
            # No memory, for one: the prompt is read like a new one.
            traceback.print_exc()
            self.cancel()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self._reading is not None:
            self._reading.cancel()
            self._over(self._reading)
        self.ready = True
        self._parts = {}

    def _over(self, reading: Reading) -> None:
        """A reading has ended, or is not waited for any more."""
        self._reading = None
        self._cache.readings.remove(reading)
        if self._coming_bytes:
            self._cache.ram.coming_bytes -= self._coming_bytes
            self._coming_bytes = 0
            # Others may have waited for the room.
            self._cache.wake()

    def _allocate(self, reading: Reading) -> None:
        needed_bytes = sum(
            tensor.bytes for head in reading.heads.values() for tensor in head.tensors.values()
        )
        ram = self._cache.ram
        if ram.coming_bytes and ram.coming_bytes + needed_bytes > ram.max_bytes:
            # One at a time where memory is not for several.
            return
        self._cache.make_room(needed_bytes)
        self._coming_bytes = needed_bytes
        ram.coming_bytes += needed_bytes
        reading.fill(self._buffers(reading))

    def _buffers(self, reading: Reading) -> Iterator[tuple[Piece, dict[str, np.ndarray[Any, Any]]]]:
        """Arrays for one piece after the other: memory that is new takes as long to get as to read into."""
        for piece, head in list(reading.heads.items()):
            arrays = {
                name: empty(dtype_of(tensor.dtype), tensor.shape) for name, tensor in head.tensors.items()
            }
            self._parts[piece] = Part(arrays, head.scalars)
            yield piece, {name: alias(array) for name, array in arrays.items()}

    def _finish(self, reading: Reading | None) -> None:
        cache, found = self._cache, self._found
        assert found is not None
        if reading is not None:
            self._over(reading)
            cache.read(reading)
            for piece, head in reading.heads.items():
                if piece in reading.bad:
                    self._parts.pop(piece, None)
                else:
                    ids = np.array(head.ids, dtype=np.uint32)
                    cache.ram.add(piece.record, ids, piece.kind, self._parts[piece])
            if reading.bad:
                self._begin()
                return
        try:
            self.caches = cache.put_together(found, self._parts, len(self._ids))
            self.length = found.length
        except Unfit:
            # Files that agree with all their hashes and still make no caches: not to be tried again.
            traceback.print_exc()
            cache.reject(list(self._parts))
        cache.used(found)
        self._parts = {}
        self.ready = True
