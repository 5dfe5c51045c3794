"""A world for the scheduler to act on: no processes, no event loop, a clock that is turned by hand.

It keeps its own account of what workers hold, from the effects alone, so that a test's invariants don't rest
on the scheduler's own bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mlxpool.parent.pool.contract import Limits
from mlxpool.parent.pool.leases import Lease
from mlxpool.parent.pool.scheduler import Scheduler
from mlxpool.parent.pool.state import ModelSpec, Ticket
from mlxpool.shared.errors import ApiError


@dataclass
class FakeWorker:
    """One process as the world sees it."""

    number: int
    spec: ModelSpec
    holds: int
    state: str = "importing"  # importing | loading | ready | draining | stopping | gone
    lease: str = "none"  # none | asked | held


@dataclass
class World:
    """Effects that remember, and the fates a test can deal out."""

    clock: float = 1000.0
    workers: dict[int, FakeWorker] = field(default_factory=dict)
    granted: list[Ticket] = field(default_factory=list)
    rejected: list[tuple[Ticket, ApiError]] = field(default_factory=list)
    revoked: list[tuple[Ticket, ApiError]] = field(default_factory=list)
    lent: list[Lease] = field(default_factory=list)
    denied: list[tuple[Lease, ApiError]] = field(default_factory=list)
    events: list[tuple[str, str, str]] = field(default_factory=list)
    scheduler: Scheduler | None = None

    # Effects
    def now(self) -> float:
        return self.clock

    def start(self, worker: int, spec: ModelSpec, go: bool) -> None:
        assert not [w for w in self.workers.values() if w.spec.name == spec.name and w.state != "gone"]
        holds = spec.planned_bytes if go else spec.overhead_bytes
        self.workers[worker] = FakeWorker(worker, spec, holds, "loading" if go else "importing")

    def start_spare(self, worker: int) -> None:
        assert self.scheduler is not None
        spec = self.scheduler.spare.spec
        assert not [w for w in self.workers.values() if w.spec.name == spec.name and w.state != "gone"]
        self.workers[worker] = FakeWorker(worker, spec, spec.overhead_bytes)

    def adopt(self, worker: int, spec: ModelSpec) -> None:
        assert self.workers[worker].state == "importing"
        assert self.workers[worker].spec.name == ""
        self.workers[worker].spec = spec

    def go(self, worker: int, spec: ModelSpec) -> None:
        assert self.workers[worker].state == "importing"
        self.workers[worker].state = "loading"
        self.workers[worker].holds = spec.planned_bytes

    def drain(self, worker: int) -> None:
        assert self.workers[worker].state == "ready"
        self.workers[worker].state = "draining"

    def stop(self, worker: int) -> None:
        assert self.workers[worker].state in ("ready", "draining")
        self.workers[worker].state = "stopping"

    def kill(self, worker: int) -> None:
        assert self.workers[worker].state != "gone"
        self.workers[worker].state = "stopping"

    def grant(self, ticket: Ticket) -> None:
        if not ticket.internal:
            assert self.workers[ticket.worker].state == "ready"
            assert self.workers[ticket.worker].spec.name == ticket.model
        self.granted.append(ticket)

    def reject(self, ticket: Ticket, err: ApiError) -> None:
        self.rejected.append((ticket, err))

    def revoke(self, ticket: Ticket, err: ApiError) -> None:
        self.revoked.append((ticket, err))

    def lease(self, worker: int) -> None:
        assert self.workers[worker].state == "ready"
        assert self.workers[worker].lease == "none"
        assert not [t for t in self.granted if t.state == "granted"], "asked while requests run"
        self.workers[worker].lease = "asked"

    def unlease(self, worker: int) -> None:
        assert self.workers[worker].lease != "none"
        self.workers[worker].lease = "none"

    def lend(self, lease: Lease) -> None:
        here = [w for w in self.workers.values() if w.state != "gone"]
        assert {w.state for w in here} <= {"importing", "ready"}, "lent while weights move"
        assert all(w.lease == "held" for w in here if w.state == "ready"), "lent while a model may compute"
        self.lent.append(lease)

    def deny(self, lease: Lease, err: ApiError) -> None:
        self.denied.append((lease, err))

    def log(self, event: str, model: str, detail: str = "") -> None:
        self.events.append((event, model, detail))

    # What a test asks and does
    @property
    def held_bytes(self) -> int:
        """Bytes that live processes hold or were promised."""
        return sum(w.holds for w in self.workers.values() if w.state != "gone")

    def alive(self, model: str) -> FakeWorker | None:
        """The model's process, or None."""
        found = [w for w in self.workers.values() if w.spec.name == model and w.state != "gone"]
        return found[0] if found else None

    def resident(self) -> list[str]:
        """Names of models that hold weights."""
        held = [w for w in self.workers.values() if w.state not in ("gone", "importing")]
        return sorted(w.spec.name for w in held if w.spec.name)

    def pool(self, budget: int, **limits: float) -> Scheduler:
        """The scheduler that acts on this world."""
        self.scheduler = Scheduler(Limits(budget_bytes=budget, **limits), self)
        return self.scheduler

    def step(self, model: str) -> bool:
        """Let the model's process take its natural next step; False when there is none to take."""
        worker, pool = self.alive(model), self.scheduler
        assert pool is not None
        if worker is None or worker.state == "importing":
            return False
        if worker.state == "ready":
            return self.answer_lease(model)
        if worker.state == "loading":
            pool.on_loading(worker.number, 1, 2)
            worker.state = "ready"
            assert pool.on_says_ready(worker.number)
            pool.on_ready(worker.number)
        elif worker.state == "draining":
            pool.on_drained(worker.number)
        else:
            worker.state = "gone"
            pool.on_exit(worker.number, "exit code 0")
        return True

    def answer_lease(self, model: str) -> bool:
        """The model's worker computes nothing any more, if it was asked for that."""
        worker = self.alive(model)
        if worker is None or worker.state != "ready" or worker.lease != "asked":
            return False
        assert self.scheduler is not None
        worker.lease = "held"
        self.scheduler.on_leased(worker.number)
        return True

    def exit(self, model: str, reason: str = "killed by SIGKILL") -> None:
        """The model's process dies by itself."""
        worker = self.alive(model)
        assert worker is not None
        assert self.scheduler is not None
        worker.state = "gone"
        self.scheduler.on_exit(worker.number, reason)

    def run(self) -> None:
        """Let every process come to rest, every granted ticket and every lease end, until nothing moves."""
        assert self.scheduler is not None
        for _ in range(10_000):
            moved = [self.step(w.spec.name) for w in list(self.workers.values()) if w.state != "gone"]
            done = [t for t in self.granted if t.state == "granted"]
            for ticket in done[:1]:
                self.scheduler.on_done(ticket)
            ended = [lease for lease in self.lent if lease.state == "held"]
            for lease in ended[:1]:
                self.scheduler.on_release(lease)
            if not any(moved) and not done and not ended:
                return
        raise AssertionError("the pool never comes to rest")

    def load(self, spec: ModelSpec) -> None:
        """Make the model resident."""
        assert self.scheduler is not None
        self.scheduler.on_load(spec)
        self.run()
        assert spec.name in self.resident()


def model(name: str, planned: int = 10, **more: object) -> ModelSpec:
    """A spec with small round numbers."""
    return ModelSpec(name, planned, **{"overhead_bytes": 1, "idle_ttl_s": None, **more})  # type: ignore[arg-type]
