"""The pool as `GET /api/pool` shows it, and the page and the metrics after it. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

from mlxpool.shared.control import CacheSummary, Phase

from .effects import PoolEvent
from .leases import Lease, Leases
from .state import Slot, Ticket


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


WaitsFor = Literal["lease", "memory", "load", "place"]


class QueueView(msgspec.Struct, frozen=True):
    """One waiting request. waits_for: the GPU that a job has for itself or gets next (holder: which), memory
    that other models hold, its model's load, or a place among its model's rows."""

    model: str
    waiting_s: float
    waits_for: WaitsFor
    holder: str | None = None


class LeasesView(msgspec.Struct, frozen=True):
    """Who uses the GPU. shared: requests that may be served now. exclusive: 1 while a job has it for itself.
    waiting: requests behind that job or the next, and jobs. holder: the job that has it, or that gets it once
    the shared ones are done."""

    shared: int
    exclusive: int
    waiting: int
    holder: str | None


class PoolView(msgspec.Struct, frozen=True):
    """The body of `GET /api/pool`. budget_bytes: the whole; prompt_cache_bytes: what no model gets of it."""

    budget_bytes: int
    prompt_cache_bytes: int
    reserved_bytes: int
    workers: list[WorkerView]
    queue: list[QueueView]
    leases: LeasesView
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


def queue_view(slot: Slot, ticket: Ticket, front: Lease | None, waiting_s: float) -> QueueView:
    """A ticket that waits for this model. front: the exclusive ask that is first in the line."""
    if front is not None and ticket.number > front.number:
        return QueueView(ticket.model, waiting_s, "lease", front.holder)
    waits_for: WaitsFor = "memory"
    if slot.phase == "ready" and len(slot.running) >= slot.spec.max_running:
        waits_for = "place"
    elif slot.phase in ("starting", "loading") and slot.told_go:
        waits_for = "load"
    return QueueView(ticket.model, waiting_s, waits_for)


def leases_view(leases: Leases) -> LeasesView:
    """The line of those who use the GPU."""
    front = leases.front
    return LeasesView(*leases.counts(), None if front is None else front.holder)


def reason_of(slot: Slot, front: Lease | None) -> str | None:
    """Why a model is in the state it is in, for a person: also a load that waits for the GPU."""
    rests = slot.phase in ("absent", "failed", "draining", "stopping")
    if front is None or not rests or not slot.waiting or slot.waiting[0].number < front.number:
        return slot.reason
    held = "is held by" if front.state == "held" else "goes first to"
    return f"its load waits: the GPU {held} {front.holder}"
