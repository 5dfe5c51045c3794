"""The pool as `GET /api/pool` shows it, and the page and the metrics after it. Plain data."""

from __future__ import annotations

import msgspec

from mlxpool.shared.control import CacheSummary, Phase

from .effects import PoolEvent


class WorkerView(msgspec.Struct, frozen=True):
    """One entry of `GET /api/pool`. since, last_used: unix seconds.

    unloading: an unload was asked for and waits for the requests that came before it. footprint_bytes:
    without its part of the prompt cache, which no model's plan holds. cache: None where it keeps no prompts.
    """

    model: str
    state: Phase
    pid: int | None
    since: float
    planned_bytes: int
    footprint_bytes: int
    active: int
    queued: int
    restarts: int
    pinned: bool
    last_used: float | None
    reason: str | None
    loaded_bytes: int
    total_bytes: int
    tokens_per_s: float
    unloading: bool
    cache: CacheSummary | None


class QueueView(msgspec.Struct, frozen=True):
    """One waiting request."""

    model: str
    waiting_s: float


class PoolView(msgspec.Struct, frozen=True):
    """The body of `GET /api/pool`. budget_bytes: the whole; prompt_cache_bytes: what no model gets of it."""

    budget_bytes: int
    prompt_cache_bytes: int
    reserved_bytes: int
    workers: list[WorkerView]
    queue: list[QueueView]
    leases: dict[str, int]
    counters: dict[str, int]
    cache: CachePanel
    recent: list[PoolEvent]


class CachePanel(msgspec.Struct, frozen=True):
    """What `GET /api/pool` says of the prompt caches of all models. Counters are since the parent's start.

    ssd: whether prompts are kept on disk. off: why nothing is written there just now. restore_ms_last: how
    long the newest restore took, 0 before the first.
    """

    bytes: int
    max_bytes: int
    ssd: bool
    ssd_bytes: int
    ssd_max_bytes: int
    hits: int
    misses: int
    cached_tokens: int
    pending: int
    restores: int
    restore_ms_last: float
    drains: int
    losses: int
    off: str | None
