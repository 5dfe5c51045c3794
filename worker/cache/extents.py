"""Neighbouring slices that share their arrays, so that a prefix is put together from a few large pieces.

Slices come one by one: as chunks complete them, and as files are read. A prompt of 16,000 tokens behind 32
layers is then 4,032 arrays, and joining them takes a GPU as long as the rest of the prompt does. So while
nothing runs, runs of full records that were used together are copied into arrays of their own, an extent, and
the records hold views of it. The edge that shaped it: an extent's memory is free again when the last of its
records has gone, so it is bounded, and the tier counts it until then.

Engine thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxpool.worker.cache.layers import Slice
from mlxpool.worker.cache.layers_kinds import POSITIONS_AXIS
from mlxpool.worker.cache.ram import Extent, Part, RamTier
from mlxpool.worker.cache.records import RECORD_TOKENS, Record

# An eighth of the cap at most, so that what one record more or less frees stays small beside it.
_SHARE = 8
# 4,096 positions: 256 pieces for a prompt of 16,000 behind 32 layers, about 2 ms of a GPU's time.
_MOST_RECORDS = 16
# Prefixes that were used and not looked at yet; of more the oldest are left as they are.
_MOST_WAITING = 64


class Gathering:
    """Which prefixes are to be looked at, and the copying. ram: the tier whose parts are changed."""

    def __init__(self, ram: RamTier) -> None:
        self._ram = ram
        self._waiting: OrderedDict[bytes, tuple[Record, ...]] = OrderedDict()

    def want(self, path: Sequence[Record]) -> None:
        """A prefix was kept or used: it may well be asked for again."""
        if len(path) > 1:
            self._waiting[path[-1].name] = tuple(path)
            self._waiting.move_to_end(path[-1].name)
            if len(self._waiting) > _MOST_WAITING:
                self._waiting.popitem(last=False)

    def step(self) -> bool:
        """Make one extent; False when there is none to make."""
        while self._waiting:
            name, path = self._waiting.popitem()
            run = self._next_run(path)
            if run:
                self._gather(run)
                self._waiting[name] = path
                return True
        return False

    def _next_run(self, path: Sequence[Record]) -> list[Part]:
        """The slices of the first run of neighbours that would be worth an extent; [] for none."""
        place = 0
        while place + 1 < len(path):
            parts: list[Part] = []
            # Runs begin at the same positions in every prefix: what two of them share is gathered once.
            end = (place // _MOST_RECORDS + 1) * _MOST_RECORDS
            for record in path[place:end]:
                part = self._ram.part(record.name, "slice") if record.full else None
                if part is None or part.extent is not None:
                    break
                parts.append(part)
            place += max(1, len(parts))
            parts = parts[: self._most(parts)]
            if len(parts) > 1 and all(_alike(parts[0], part) for part in parts):
                return parts
        return []

    def _most(self, parts: list[Part]) -> int:
        return self._ram.max_bytes // (_SHARE * max(1, parts[0].bytes)) if parts else 0

    def _gather(self, parts: list[Part]) -> None:
        arrays = {
            name: mx.concatenate([part.arrays[name] for part in parts], axis=POSITIONS_AXIS)
            for name in parts[0].arrays
        }
        mx.eval(list(arrays.values()))
        extent = Extent(arrays, len(parts) * RECORD_TOKENS)
        for place, part in enumerate(parts):
            start = place * RECORD_TOKENS
            views = {name: array[:, :, start : start + RECORD_TOKENS] for name, array in arrays.items()}
            mx.eval(list(views.values()))
            part.move_into(extent, start, views)


def _alike(one: Part, other: Part) -> bool:
    """Whether their arrays can be joined by position."""
    return one.arrays.keys() == other.arrays.keys() and all(
        array.shape == other.arrays[name].shape and array.dtype == other.arrays[name].dtype
        for name, array in one.arrays.items()
    )


def joined(records: Sequence[Record], part_of: Callable[[Record], Part]) -> list[Slice]:
    """The slices of these records, in order, where neighbours of one extent are one slice."""
    runs: list[tuple[int, int, Part]] = []
    for record in records:
        part = part_of(record)
        if runs and part.extent is not None:
            start, end, first = runs[-1]
            if first.extent is part.extent and first.start + end - start == part.start:
                runs[-1] = start, record.end, first
                continue
        runs.append((record.start, record.end, part))
    return [(start, end, _tensors(part, end - start)) for start, end, part in runs]


def _tensors(part: Part, length: int) -> dict[str, mx.array]:
    extent = part.extent
    if extent is None or length == RECORD_TOKENS:
        return part.arrays
    if not part.start and length == extent.tokens:
        return extent.arrays
    return {name: array[:, :, part.start : part.start + length] for name, array in extent.arrays.items()}
