"""What an engine is given and what it counts: a loaded model, limits, plain numbers. It owns none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mlxpool.shared.checkpoint import Checkpoint
from mlxpool.worker.engine.admission import KvCost


class Loaded(msgspec.Struct, frozen=True):
    """What `load` hands to the engine, made on the engine's thread. make_cache: fresh caches of one row.
    checkpoint: the folder it was read from. cache_classes: its caches by class."""

    model: Any
    make_cache: Callable[[], list[Any]]
    kv: KvCost
    weights_bytes: int
    dtype: str
    logits_width: int
    checkpoint: Checkpoint
    cache_classes: dict[str, int]


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
