"""Where records are cut from: caches of one row, or one row of caches that several share."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from mlxpool.worker.cache import layers
from mlxpool.worker.cache.records import Layout


class Source(Protocol):
    """Live caches that hold a prefix."""

    def cut(self, start: int, end: int) -> dict[str, mx.array]: ...

    def state(self, length: int) -> tuple[dict[str, mx.array], dict[str, list[int]]]: ...


class Caches:
    """A row's own caches as a Source."""

    def __init__(self, caches: list[Any], layout: Layout) -> None:
        self._caches, self._layout = caches, layout

    def cut(self, start: int, end: int) -> dict[str, mx.array]:
        return layers.cut(self._caches, self._layout, start, end)

    def state(self, length: int) -> tuple[dict[str, mx.array], dict[str, list[int]]]:
        return layers.state(self._caches, self._layout, length)


class RowOfCaches:
    """One row of batch caches as a Source."""

    def __init__(self, caches: list[Any], place: int, layout: Layout) -> None:
        self._caches, self._place, self._layout = caches, place, layout

    def cut(self, start: int, end: int) -> dict[str, mx.array]:
        return layers.cut_row(self._caches, self._place, self._layout, start, end)

    def state(self, length: int) -> tuple[dict[str, mx.array], dict[str, list[int]]]:
        return layers.row_state(self._caches, self._place, self._layout, length)


def row_source(caches: list[Any], place: int | None, layout: Layout) -> Source:
    """A row's caches as a Source. place: where it is in caches that several rows share, None for its own."""
    return Caches(caches, layout) if place is None else RowOfCaches(caches, place, layout)
