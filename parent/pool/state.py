"""What the scheduler remembers: specs, tickets and one slot per model.

Plain data, owned and mutated by `Scheduler` alone; `placement` reads it. A slot exists from the first time
its model is spoken of and never goes away, so pins, failures and crash history survive a worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from mlxpool.shared.control import Phase

from .leases import OPEN

# The slot of the worker that has no model yet has a name that no model can have.
SPARE = ""


@dataclass(frozen=True)
class ModelSpec:
    """What a start of this model would take, as the library sees its files now.

    planned_bytes: reserved from the decision to load until the process is gone. overhead_bytes: the part of
    it that a worker without weights uses. max_running: tickets granted at once. idle_ttl_s: None = never.
    fault: why it can't be loaded at all. too_large: why no budget here could hold it.
    """

    name: str
    planned_bytes: int
    overhead_bytes: int = 0
    max_running: int = 8
    queue_limit: int = 64
    idle_ttl_s: float | None = 900.0
    stamp: str = ""
    fault: str | None = None
    too_large: str | None = None


@dataclass
class Ticket:
    """One request's place: queued → granted → done. In flight from admission to the end of its body.

    number: order of arrival over all models. internal: made by `load`, done the moment it is granted.
    arrived: since when it waits; an internal one since the last job before it has ended.
    keep_alive_s: the idle time-out this request wants for its model; negative = never, None = not said.
    """

    number: int
    model: str
    arrived: float
    internal: bool = False
    keep_alive_s: float | None = None
    state: Literal["queued", "granted", "done"] = "queued"
    worker: int = 0


@dataclass
class Slot:
    """Everything about one model. `reserved` is what the budget is charged for it right now."""

    name: str
    spec: ModelSpec
    phase: Phase = "absent"
    worker: int = 0  # number of the current worker, 0 when there is none
    told_go: bool = False  # the worker may touch weights
    imported: bool = False
    adopted: bool = False  # the worker was the spare
    reserved: int = 0
    footprint: int = 0
    since: float = 0.0
    pinned: bool = False
    waiting: deque[Ticket] = field(default_factory=deque)
    running: dict[int, Ticket] = field(default_factory=dict)
    last_used: float = 0.0
    last_granted: float = 0.0
    last_progress: float = 0.0
    progress: int = -1
    pending: int = 0  # rows its worker owed at its last heartbeat, also of clients that have left
    loaded_bytes: int = 0
    total_bytes: int = 0
    keep_alive_s: float | None = None
    # Tickets that were there when it became ready: what it was loaded for is served, whoever else waits.
    serves_before: int = 0
    # Tickets numbered below this are served before the unload that was asked for.
    unload_before: int | None = None
    # Set while this model's tickets wait for an eviction: tickets below it are served by the victim first.
    evicts_from: int | None = None
    failures: int = 0
    retry_at: float = 0.0
    reason: str | None = None
    crashes: deque[float] = field(default_factory=deque)
    cooldown_s: float = 0.0
    restarts: int = 0
    revive: bool = False  # pinned, crashed, and to be loaded again
    # Whether its worker has been asked to compute nothing, and does so; and since when it is asked.
    lease: Literal["none", "asked", "held"] = "none"
    lease_since: float = 0.0

    @property
    def alive(self) -> bool:
        """True while a process exists for this model."""
        return self.worker != 0

    @property
    def is_shown(self) -> bool:
        """Whether people are told of it: there is a process, a failure, or the wish to keep it."""
        return self.alive or self.phase == "failed" or self.pinned

    @property
    def claim(self) -> int:
        """Bytes its start will take once its victims are gone, beyond what it is charged now."""
        return self.spec.planned_bytes - self.reserved if self.phase == "starting" and not self.told_go else 0

    @property
    def idle_ttl_s(self) -> float | None:
        """Seconds without a ticket after which it is unloaded; None = never."""
        ttl = self.spec.idle_ttl_s if self.keep_alive_s is None else self.keep_alive_s
        return None if ttl is None or ttl < 0 else ttl

    @property
    def works(self) -> bool:
        """True while its worker has something to do: requests, or rows that their clients have left."""
        return bool(self.running) or self.pending > 0

    def owes(self, before: int, gate: int = OPEN) -> bool:
        """True when it runs a ticket, or queues one that is served before an eviction from `before` on.

        gate: tickets from there on wait for somebody else.
        """
        first = self.waiting[0].number if self.waiting else None
        return bool(self.running) or (
            first is not None and first < min(gate, max(before, self.serves_before))
        )
