"""A model's caches ⇄ the slices and states of records, for every class of mlx-lm's caches.

`cut` and `state` read caches of one row, `cut_row` and `row_state` one row of caches that several share;
`assemble` makes caches of one row of what they gave. All is lazy, and nothing that is read is changed. What
they give is contiguous and has memory of its own, or shares a buffer at most 16 KB larger. Evaluate it before
the caches are written again: a graph that still reads a buffer makes the next write copy all of it. Engine
thread only.

The edge that shaped it: whether a layer can be cut depends on what came after. A window that has wrapped has
lost a record's first positions, so a slice is cut right behind the chunk that completes its record. Cut too
late it lacks that leaf, which longer prefixes don't need; where one does, `assemble` says which slices lack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
)

from mlxpool.worker.cache.layers_kinds import POSITIONS_AXIS, Adapter, Unfit, adapter_of
from mlxpool.worker.cache.records import Layout, Leaf

# By leaf and part ("3.k"), and by leaf ("3").
Tensors = dict[str, mx.array]
Scalars = dict[str, list[int]]

# (start, end, tensors).
Slice = tuple[int, int, Mapping[str, mx.array]]


def layout_of(caches: Sequence[Any]) -> Layout | None:
    """The leaves of a row's caches; None where some class isn't known: such a model has no prompt cache."""
    leaves: list[Leaf] = []
    for cache in _leaves(caches):
        adapter = adapter_of(cache)
        if adapter is None:
            return None
        leaves.append(Leaf(type(cache).__name__, adapter.sliced))
    return Layout(tuple(leaves)) if leaves else None


def cut(caches: Sequence[Any], layout: Layout, start: int, end: int) -> Tensors:
    """Positions [start, end) of the leaves that can be cut by position.

    Raises Unfit where the caches aren't of this layout or hold fewer tokens than `end`.
    """
    found: Tensors = {}
    leaves = _checked(caches, layout)
    for place in layout.sliced:
        cache, adapter = leaves[place]
        if (length := adapter.length(cache)) is None or length < end:
            raise Unfit(f"positions up to {end} of a cache that holds {length}")
        for part, buffer in zip(adapter.parts, adapter.buffers(cache), strict=True):
            found[f"{place}.{part}"] = mx.contiguous(buffer[:, :, start:end])
    return found


def state(caches: Sequence[Any], layout: Layout, length: int) -> tuple[Tensors, Scalars]:
    """All that the leaves hold which can't be cut at `length`, the length that the caches have now.

    Raises Unfit where they aren't of this layout or hold another number of tokens.
    """
    found: Tensors = {}
    scalars: Scalars = {}
    leaves = _checked(caches, layout)
    for cache, adapter in leaves:
        # One that counts speaks for those that don't.
        if (held := adapter.length(cache)) is not None and held != length:
            raise Unfit(f"the state at {length} of a cache that holds {held}")
    for place in layout.stateful:
        cache, adapter = leaves[place]
        parts, scalars[str(place)] = adapter.state(cache)
        for part, array in parts.items():
            found[f"{place}.{part}"] = mx.contiguous(array)
    return found, scalars


def cut_row(caches: Sequence[Any], place: int, layout: Layout, start: int, end: int) -> Tensors:
    """`cut` of one row of caches that several share."""
    return cut(_row(caches, place), layout, start, end)


def row_state(caches: Sequence[Any], place: int, layout: Layout, length: int) -> tuple[Tensors, Scalars]:
    """`state` of one row of caches that several share: that of the row which goes on alone."""
    return state(_row(caches, place), layout, length)


def assemble(
    make_cache: Callable[[], list[Any]],
    layout: Layout,
    length: int,
    slices: Sequence[Slice],
    state: tuple[Mapping[str, mx.array], Mapping[str, Sequence[int]]] | None,
    room_tokens: int = 0,
) -> list[Any]:
    """A row's caches that hold `length` tokens, 1 or more.

    slices: (start, end, tensors), without a gap from 0 to `length`, where the last is cut short. state: what
    was held at exactly `length`, None where no leaf needs it. room_tokens: tokens that will follow; buffers
    that grow by copying have room for them already. Raises Unfit where something lacks or doesn't
    fit.
    """
    caches = make_cache()
    leaves = _checked(caches, layout)
    wanted = [(place, *leaves[place]) for place in layout.sliced]
    if wanted:
        names = [f"{place}.{part}" for place, _, adapter in wanted for part in adapter.parts]
        _check_slices(slices, names, length)
    for place, cache, adapter in wanted:
        room = adapter.room(length, room_tokens)
        buffers = [_joined(slices, f"{place}.{part}", length, room) for part in adapter.parts]
        adapter.refill(cache, buffers, length)
    for place in layout.stateful:
        if state is None:
            raise Unfit(f"a prefix of {length} without the state that it needs")
        cache, adapter = leaves[place]
        _restore(cache, adapter, place, *state)
        if (held := adapter.length(cache)) is not None and held != length:
            raise Unfit(f"a state at {held} for one at {length}")
    return caches


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _leaves(cache.caches)
        else:
            yield cache


def _checked(caches: Sequence[Any], layout: Layout) -> list[tuple[Any, Adapter]]:
    """The leaves of a row's caches with their adapters. Raises Unfit where they are others."""
    found: list[tuple[Any, Adapter]] = []
    for cache in _leaves(caches):
        adapter = adapter_of(cache)
        if adapter is None:
            raise Unfit(f"a cache of class {type(cache).__name__}")
        found.append((cache, adapter))
    held = tuple(Leaf(type(cache).__name__, adapter.sliced) for cache, adapter in found)
    if held != layout.leaves:
        raise Unfit("caches of another layout")
    return found


def _row(caches: Sequence[Any], place: int) -> list[Any]:
    """One row of shared caches as plain ones, flat. They are for reading: most share the row's memory."""
    return [_one(cache, place) for cache in _leaves(caches)]


def _one(cache: Any, place: int) -> Any:
    if type(cache) is BatchKVCache:
        # Its own `extract` copies the whole row.
        view = KVCache()
        padding = cache.left_padding.tolist()[place]
        if cache.keys is not None:
            view.keys, view.values = (
                buffer[place : place + 1, :, padding : cache._idx] for buffer in (cache.keys, cache.values)
            )
            view.offset = cache._idx - padding
        return view
    if type(cache) is BatchRotatingKVCache:
        if cache.keys is None:
            raise Unfit("a BatchRotatingKVCache that the model leaves empty")
        return cache.extract(place)
    if type(cache) is ArraysCache:
        # Its own `extract` fails on an entry that a model leaves empty.
        row = ArraysCache(len(cache.cache))
        row.cache = [None if entry is None else entry[place : place + 1] for entry in cache.cache]
        return row
    raise Unfit(f"a cache of class {type(cache).__name__} is not shared by rows")


def _check_slices(slices: Sequence[Slice], names: Sequence[str], length: int) -> None:
    """Raises Unfit where they don't follow each other up to `length`, or one hasn't all names."""
    reached = 0
    for start, end, _ in slices:
        if start != reached or end <= start:
            raise Unfit(f"a slice from {start} to {end} where one from {reached} follows")
        reached = end
    if not slices or not slices[-1][0] < length <= reached:
        raise Unfit(f"slices up to {reached} for a prefix of {length}")
    lacking = [start for start, _, tensors in slices if any(name not in tensors for name in names)]
    if lacking:
        raise Unfit(f"the slices from {', '.join(map(str, lacking))} lack layers")


def _joined(slices: Sequence[Slice], name: str, length: int, room: int) -> mx.array:
    """One buffer of all slices, cut at `length`, with `room` positions behind. A new array."""
    pieces: list[mx.array] = []
    for start, end, tensors in slices:
        piece = tensors[name]
        if piece.ndim != 4 or piece.shape[POSITIONS_AXIS] != end - start:
            raise Unfit(f"{name} of shape {piece.shape} in the slice from {start} to {end}")
        pieces.append(piece if end <= length else piece[:, :, : length - start])
    rows, heads, _, width = pieces[0].shape
    if any(piece.shape[:2] != (rows, heads) or piece.shape[3] != width for piece in pieces):
        raise Unfit(f"{name} of several shapes")
    if room:
        pieces.append(mx.zeros((rows, heads, room, width), pieces[0].dtype))
    return mx.concatenate(pieces, axis=POSITIONS_AXIS)


def _restore(
    cache: Any,
    adapter: Adapter,
    place: int,
    tensors: Mapping[str, mx.array],
    scalars: Mapping[str, Sequence[int]],
) -> None:
    prefix = f"{place}."
    # New objects: the model writes into them, and assigning to a slice changes the object it is done on.
    parts = {
        name.removeprefix(prefix): mx.contiguous(tensor)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    try:
        adapter.restore(cache, parts, scalars[str(place)])
    except Unfit:
        raise
    except (KeyError, ValueError) as err:
        raise Unfit(f"no state of a {type(cache).__name__}") from err
