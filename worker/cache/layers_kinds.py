"""What the classes of caches have in common: positions to cut, a state to keep, and how both go back in.

One adapter per class of mlx-lm, found by the exact class, because a subclass may keep more than we know of.
Adapters read caches in use; they change only those that `make_cache` has just made. The edge that shaped it:
a rotating cache that has wrapped gives the live cache's logits only if its buffer goes back as it was, its
index with it; put into the order of time it differs in the last bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

# Buffers of keys and values are [rows, heads, positions, width].
POSITIONS_AXIS = 2


class Unfit(ValueError):
    """These caches can't be held, or these parts make none: the prefix is a miss. One line."""


class Adapter:
    """How one class is read and made: here that of keys and values of every position.

    sliced: whether it can be cut by position. parts: names of the buffers that have an axis of positions.
    step: what they grow by, in positions.
    """

    sliced: bool = True
    parts: tuple[str, ...] = ("k", "v")
    step: int = KVCache.step

    def length(self, cache: Any, /) -> int | None:
        """Tokens it has seen, None where it doesn't count them."""
        return int(cache.offset)

    def buffers(self, cache: Any, /) -> Sequence[mx.array]:
        """The buffers of `parts`, unused room at their end. Raises Unfit where there are none."""
        if cache.keys is None:
            raise Unfit(f"a {type(cache).__name__} that the model leaves empty")
        return cache.keys, cache.values

    def refill(self, cache: Any, buffers: Sequence[mx.array], length: int, /) -> None:
        """Give a fresh cache buffers that begin with `length` positions."""
        cache.keys, cache.values = buffers
        cache.offset = length

    def room(self, length: int, more: int, /) -> int:
        """Positions to leave free behind `length`, so that `more` tokens don't make the buffers grow."""
        return -(-(length + more) // self.step) * self.step - length

    def state(self, cache: Any, /) -> tuple[dict[str, mx.array], list[int]]:
        """All it holds: buffers as they are, and the numbers that belong to them. Raises Unfit."""
        raise Unfit(f"a {type(cache).__name__} is held by position")

    def restore(self, cache: Any, _parts: Mapping[str, mx.array], _scalars: Sequence[int], /) -> None:
        """Give a fresh cache a state. Raises Unfit, KeyError or ValueError where it is none of this cache."""
        raise Unfit(f"a {type(cache).__name__} is held by position")


class _Concatenated(Adapter):
    """Its buffers are its content: room in them would be attended to."""

    def room(self, _length: int, _more: int, /) -> int:
        return 0


class _Quantised(Adapter):
    """Three buffers each: packed numbers, scales, biases."""

    parts = ("k.w", "k.s", "k.b", "v.w", "v.s", "v.b")
    step = QuantizedKVCache.step

    def buffers(self, cache: Any, /) -> Sequence[mx.array]:
        keys, values = super().buffers(cache)
        return *keys, *values

    def refill(self, cache: Any, buffers: Sequence[mx.array], length: int, /) -> None:
        cache.keys, cache.values = tuple(buffers[:3]), tuple(buffers[3:])
        cache.offset = length


class _Rotating(Adapter):
    """In order until it holds more than its window; then a ring behind `keep` positions that stay. Held whole
    from the beginning: what a record's positions were is lost as soon as a later chunk has passed the window.
    """

    sliced = False

    def state(self, cache: Any, /) -> tuple[dict[str, mx.array], list[int]]:
        keys, values = self.buffers(cache)
        held, index = keys.shape[POSITIONS_AXIS], cache._idx
        if index == held > cache.max_size:
            # A chunk leaves more than the window; whatever comes next drops that first, and in this way.
            surplus = held - cache.max_size
            keys, values = (_without(buffer, cache.keep, surplus) for buffer in (keys, values))
            index = cache.max_size
        return {"k": keys, "v": values}, [cache.offset, index, cache.keep, cache.max_size]

    def restore(self, cache: Any, parts: Mapping[str, mx.array], scalars: Sequence[int], /) -> None:
        offset, index, keep, max_size = scalars
        if (keep, max_size) != (cache.keep, cache.max_size):
            raise Unfit(f"a window of {max_size} for one of {cache.max_size}")
        super().refill(cache, [parts["k"], parts["v"]], offset)
        cache._idx = index


class _Chunked(Adapter):
    """In order until its front has been trimmed; then the positions from `start_position` on. Held whole, as
    windows are."""

    sliced = False
    step = ChunkedKVCache.step

    def state(self, cache: Any, /) -> tuple[dict[str, mx.array], list[int]]:
        used = cache.offset - cache.start_position
        keys, values = (buffer[:, :, :used] for buffer in self.buffers(cache))
        return {"k": keys, "v": values}, [cache.offset, cache.start_position, cache.chunk_size]

    def restore(self, cache: Any, parts: Mapping[str, mx.array], scalars: Sequence[int], /) -> None:
        offset, start_position, chunk_size = scalars
        if chunk_size != cache.chunk_size:
            raise Unfit(f"a chunk of {chunk_size} for one of {cache.chunk_size}")
        self.refill(cache, [parts["k"], parts["v"]], offset)
        cache.start_position = start_position


class _Arrays(Adapter):
    """An SSM's or a convolution's state: no positions, and entries that a model may leave empty."""

    sliced = False
    parts = ()

    def length(self, _cache: Any, /) -> int | None:
        return None

    def state(self, cache: Any, /) -> tuple[dict[str, mx.array], list[int]]:
        held = {str(place): entry for place, entry in enumerate(cache.cache) if entry is not None}
        if not all(isinstance(entry, mx.array) for entry in held.values()):
            raise Unfit("an ArraysCache that holds more than arrays")
        return held, [len(cache.cache), *map(int, held)]

    def restore(self, cache: Any, parts: Mapping[str, mx.array], scalars: Sequence[int], /) -> None:
        entries, *filled = scalars
        if entries != len(cache.cache):
            raise Unfit(f"{entries} arrays for {len(cache.cache)}")
        for place in filled:
            cache[place] = parts[str(place)]


_ADAPTERS: dict[type, Adapter] = {
    KVCache: Adapter(),
    ConcatenateKVCache: _Concatenated(),
    QuantizedKVCache: _Quantised(),
    RotatingKVCache: _Rotating(),
    ChunkedKVCache: _Chunked(),
    ArraysCache: _Arrays(),
}


def adapter_of(cache: Any) -> Adapter | None:
    """None for a class that isn't known."""
    return _ADAPTERS.get(type(cache))


def _without(buffer: mx.array, keep: int, dropped: int) -> mx.array:
    """The buffer less `dropped` positions behind the first `keep`."""
    rest = buffer[:, :, keep + dropped :]
    return mx.concatenate([buffer[:, :, :keep], rest], axis=POSITIONS_AXIS) if keep else rest
