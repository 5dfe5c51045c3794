"""What an engine is given and what it counts: a loaded model, limits, plain numbers. It owns none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from mlxpool.shared.colibri.stats import ColibriStats, HeatMap
from mlxpool.worker.cache.fingerprint import ModelFiles
from mlxpool.worker.engine.admission import KvCost
from mlxpool.worker.engine.speculation import Draft


class Stream(Protocol):
    """What reads a model's experts as they are needed. Engine thread only, but for `progress`, `stats` and
    `heat`, which any thread may ask while a pass runs.

    progress: grows with each layer and group of experts. stop: asked between those, and where it says so the
    pass is given up with Interrupted. slots: of each layer, now. slot_bytes: what one in every layer
    takes of the machine's memory, 0 where they lie in a device's own.
    """

    stop: Callable[[], bool]

    @property
    def progress(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    def stats(self) -> ColibriStats: ...

    def heat(self) -> HeatMap: ...

    def overwritten(self) -> str | None:
        """Between passes: a file whose weights were overwritten since it was opened, None for none. What was
        computed since this was last asked may then come of either."""
        ...

    def turn_ended(self) -> None:
        """A request has ended: what was learned from it is used and, now and then, written."""
        ...

    def resize(self, slots: int) -> None:
        """Between two passes: other slots per layer, 1 or more, memory given back or taken."""
        ...

    def save(self) -> None:
        """Write what was learned."""
        ...

    def close(self) -> None: ...


class Loaded(msgspec.Struct, frozen=True):
    """What `load` hands to the engine, made on the engine's thread. make_cache: fresh caches of one row.
    files: what it was read from. cache_classes: its caches by class. stream: of experts, None where
    all of the model is in memory. draft: of a lone row's tokens, None for none."""

    model: Any
    make_cache: Callable[[], list[Any]]
    kv: KvCost
    weights_bytes: int
    dtype: str
    logits_width: int
    files: ModelFiles
    cache_classes: dict[str, int]
    stream: Stream | None = None
    draft: Draft | None = None


class Limits(msgspec.Struct, frozen=True):
    """batch: rows that decode together. kv_pool_bytes: what all of them may hold."""

    batch: int
    kv_pool_bytes: int


class Counters(msgspec.Struct):
    """Written by the engine thread, read by anyone: plain numbers that only grow, or the latest reading."""

    progress: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    decode_s: float = 0.0
    cancelled: int = 0
    errors: int = 0
    rows: int = 0
    kv_used_bytes: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
