"""The scheduler: every decision about models and tickets, and no side effect of its own.

A plain class. One event loop owns it and feeds it events (`on_…`); all it does to the world goes through
`Effects`. It never awaits, so between two events nothing changes but the clock, and a read of state that
gates a change can't go stale: such reads happen here and nowhere else. After each event `_settle` brings the
pool to rest: memory is placed (placement.py), tickets are granted, idle models leave, and a job whose turn it
is gets the GPU (leases.py, lending.py). Whether a request may queue at all is admission.py's answer.

Numbers: a *worker number* names one process for ever; an event for a worker that is no longer its model's
current one is dropped, which is what makes late exits and late heartbeats harmless.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.units import format_duration, format_size

from .admission import (
    RETRY_FULL_S,
    RETRY_TIMEOUT_S,
    check_admission,
    check_fit,
    gpu_leased,
    load_failed,
    queue_timeout,
)
from .contract import Counters, Effects, Limits
from .deadlines import expires, idle_deadline, load_deadline, next_deadline, stall_deadline
from .leases import Lease, Leases
from .lending import Step, check_room, next_step
from .placement import is_over_budget, over_budget_victim, place
from .state import SPARE, ModelSpec, Slot, Ticket

# After a failed load: wait this long before the next try, seconds (then the last one each time).
LOAD_BACKOFF_S = (1.0, 5.0, 30.0)
# So many crashes of a serving model within the window start a cool-down.
CRASH_LIMIT, CRASH_WINDOW_S = 3, 60.0
COOLDOWN_FIRST_S, COOLDOWN_MAX_S = 30.0, 600.0


class Scheduler:
    """Models, tickets and memory. Owned by one task; see the module's docstring."""

    def __init__(self, limits: Limits, effects: Effects) -> None:
        self.limits = limits
        self.slots: dict[str, Slot] = {}
        self.counters = Counters()
        self.closed = False
        self._fx = effects
        self._next_ticket = 1
        self._next_worker = 1
        self._by_worker: dict[int, Slot] = {}
        self._closing: dict[str, int] = {}
        self.leases = Leases()
        # The worker without a model. Like a slot in everything that a process can do, and in no listing.
        self.spare = Slot(SPARE, ModelSpec(SPARE, limits.spare_bytes, limits.spare_bytes))
        self._wants_spare = limits.spare_bytes > 0

    # ---- requests -----------------------------------------------------------------------------------

    def on_request(
        self, spec: ModelSpec, *, keep_alive_s: float | None = None, internal: bool = False
    ) -> Ticket:
        """Admit a request for a model, or raise the ApiError it is refused with.

        The ticket is granted or rejected through the effects, possibly before this returns.
        """
        slot = self._slot(spec)
        now = self._fx.now()
        if self.closed:
            raise error("shutting_down", "the server is shutting down", retry_after_s=RETRY_TIMEOUT_S)
        if internal:  # someone asked for this load by name: old failures don't hold it back
            slot.failures, slot.cooldown_s, slot.retry_at = 0, 0.0, now
            slot.crashes.clear()
        if slot.phase in ("absent", "failed") and spec.fault is not None:
            slot.phase, slot.reason, slot.retry_at = "failed", spec.fault, now
        check_admission(slot, self.slots.values(), self.limits.budget_bytes, now, internal=internal)
        ticket = self._queue(slot, now, internal=internal, keep_alive_s=keep_alive_s)
        self._settle()
        return ticket

    def _queue(
        self, slot: Slot, now: float, *, internal: bool = False, keep_alive_s: float | None = None
    ) -> Ticket:
        ticket = Ticket(self._next_ticket, slot.name, now, internal, keep_alive_s)
        self._next_ticket += 1
        self.leases.share(ticket.number)
        slot.waiting.append(ticket)
        return ticket

    def on_done(self, ticket: Ticket) -> None:
        """The request's body ended, failed, or its client left: queued or granted, the ticket is over."""
        if ticket.state == "done":
            return
        slot = self.slots[ticket.model]
        queued = ticket.state == "queued"
        self._over(ticket)
        if queued:
            slot.waiting.remove(ticket)
            if not slot.waiting:
                slot.evicts_from = None
                if slot.phase in ("starting", "loading"):
                    self._cancel_load(slot, "nobody waits for it any more")
        elif slot.running.pop(ticket.number, None) is not None:
            slot.last_used = self._fx.now()
            self._wants_spare = self.limits.spare_bytes > 0
        self._settle()

    def on_first_token(self, ticket: Ticket) -> None:
        """The client hears from its model: the machine has time to prepare the next switch."""
        if ticket.state == "granted" and not self._wants_spare and self.limits.spare_bytes > 0:
            self._wants_spare = True
            self._settle()

    # ---- leases -------------------------------------------------------------------------------------

    def on_exclusive(self, holder: str, memory_bytes: int) -> Lease:
        """Somebody wants the GPU alone, and so much memory. Raises ApiError where that can never be.

        It is lent or denied through the effects, possibly before this returns. End it with `on_release`.
        """
        if self.closed:
            raise error("shutting_down", "the server is shutting down", retry_after_s=RETRY_TIMEOUT_S)
        check_room(holder, memory_bytes, self.slots.values(), self.limits.budget_bytes)
        lease = Lease(self._next_ticket, holder, memory_bytes, self._fx.now())
        self._next_ticket += 1
        self.leases.ask(lease)
        self._settle()
        return lease

    def on_release(self, lease: Lease) -> None:
        """It is given back, or given up while it waits."""
        if lease.state == "over":
            return
        if lease.state == "held":
            self._fx.log("release", lease.holder, "gave the GPU back")
        self._end_lease(lease)
        self._settle()

    # ---- commands -----------------------------------------------------------------------------------

    def on_load(self, spec: ModelSpec) -> Ticket | None:
        """Load a model though no request asks for it. Joins a load that is under way. Raises ApiError."""
        slot = self._slot(spec)
        if slot.phase in ("starting", "loading", "ready") and slot.unload_before is None:
            return None
        if any(t.internal for t in slot.waiting):
            return None
        return self.on_request(spec, internal=True)

    def on_unload(self, name: str, *, force: bool = False) -> None:
        """Unload once the tickets that are there now are served; with `force`, end them now with an error."""
        slot = self.slots.get(name)
        if slot is None:
            return
        slot.revive = False
        for ticket in [t for t in slot.waiting if t.internal]:
            self._reject(slot, ticket, _unloaded(name))
        if force:
            for ticket in list(slot.waiting):
                self._reject(slot, ticket, _unloaded(name))
            self._revoke_all(slot, _unloaded(name))
        if slot.phase in ("starting", "loading") and not slot.waiting:
            self._cancel_load(slot, "unloaded by request")
        elif slot.phase == "ready" and force:
            self._stop(slot, "unloaded by request")
        elif slot.phase in ("starting", "loading", "ready"):
            slot.unload_before = self._next_ticket
        elif slot.phase == "failed":
            slot.phase, slot.reason, slot.failures = "absent", None, 0
        self._settle()

    def on_keep(self, name: str) -> None:
        """Take back an unload that still waits for tickets."""
        slot = self.slots.get(name)
        if slot is not None and slot.phase in ("starting", "loading", "ready"):
            slot.unload_before = None
            self._settle()

    def on_pin(self, spec: ModelSpec, pinned: bool) -> None:
        """A pinned model is never evicted and never times out; it may still be unloaded by name."""
        slot = self._slot(spec)
        slot.pinned = pinned
        slot.revive = slot.revive and pinned
        slot.last_used = max(slot.last_used, self._fx.now()) if slot.alive and not pinned else slot.last_used
        if pinned:
            self._reject_unplaceable()
        self._settle()

    def on_limits(self, limits: Limits, specs: Iterable[ModelSpec] = ()) -> None:
        """Other limits from now on. What a smaller budget no longer holds leaves as it goes idle.

        specs: of models that have been spoken of, under these limits: who still waits is placed by them.
        """
        self.limits = limits
        for spec in specs:
            self._slot(spec)
        self.spare.spec = ModelSpec(SPARE, limits.spare_bytes, limits.spare_bytes)
        self._wants_spare = limits.spare_bytes > 0
        if not self._wants_spare and self.spare.phase == "starting":
            self._cancel_load(self.spare, "no spare is wanted")
        self._reject_unplaceable()
        self._settle()

    def on_shutdown(self) -> None:
        """Refuse what is queued, let what runs end while its worker drains, stop everything."""
        self.closed = True
        gone = error("shutting_down", "the server is shutting down", retry_after_s=RETRY_TIMEOUT_S)
        for slot in self.slots.values():
            for ticket in list(slot.waiting):
                self._reject(slot, ticket, gone)
            if slot.phase in ("starting", "loading"):
                self._cancel_load(slot, "shutting down")
            elif slot.phase == "ready":
                self._drain(slot, "shutting down")
        if self.spare.phase == "starting":
            self._cancel_load(self.spare, "shutting down")
        for lease in self.leases.asks():
            waits = lease.state == "waiting"
            self.leases.end(lease)
            if waits:
                self._fx.deny(lease, gone)

    def on_shutdown_now(self) -> None:
        """Second signal: cut everything."""
        self.on_shutdown()
        for slot in self._processes():
            self._revoke_all(slot, error("shutting_down", "the server is shutting down"))
            if slot.alive:
                slot.phase = "stopping"
                self._fx.kill(slot.worker)

    @property
    def empty(self) -> bool:
        """True when no process is left."""
        return not any(s.alive for s in self._processes())

    def _processes(self) -> list[Slot]:
        return [*self.slots.values(), self.spare]

    # ---- what workers report --------------------------------------------------------------------------

    def on_imported(self, worker: int) -> None:
        """The worker has imported everything."""
        if (slot := self._current(worker)) is not None:
            slot.imported = True
            slot.last_progress = self._fx.now()

    def on_loading(self, worker: int, done_bytes: int, total_bytes: int) -> None:
        """Loading progress. A line that says no more than the last one is none."""
        slot = self._current(worker)
        if slot is None or slot.phase not in ("starting", "loading"):
            return
        if not slot.told_go:
            self._fail(slot, "the worker loads weights before it was told to")
            self._settle()
            return
        if slot.phase == "starting":
            slot.phase = "loading"
            slot.since = slot.last_progress = self._fx.now()
        if done_bytes > slot.loaded_bytes:
            slot.last_progress = self._fx.now()
        slot.loaded_bytes, slot.total_bytes = done_bytes, total_bytes

    def on_says_ready(self, worker: int) -> bool:
        """The worker says it is ready. True when that may be so: its socket decides, see `on_ready`."""
        slot = self._current(worker)
        if slot is None or slot.phase not in ("starting", "loading"):
            return False
        if not slot.told_go:
            self._fail(slot, "the worker says it is ready before it was told to load")
            self._settle()
            return False
        return True

    def on_ready(self, worker: int) -> None:
        """The worker's socket has answered."""
        slot = self._current(worker)
        if slot is None or slot.phase not in ("starting", "loading"):
            return
        now = self._fx.now()
        slot.phase, slot.since, slot.failures, slot.reason = "ready", now, 0, None
        slot.last_used = slot.last_progress = now
        slot.serves_before = self._next_ticket
        self._fx.log("ready", slot.name)
        self._settle()

    def on_failed(self, worker: int, reason: str) -> None:
        """The worker says that the model can't be loaded."""
        slot = self._current(worker)
        if slot is not None and slot.phase in ("starting", "loading"):
            self._fail(slot, reason)
            self._settle()

    def on_unreachable(self, worker: int, reason: str) -> None:
        """A ready worker's socket takes no connection: it is as good as dead, and ended."""
        slot = self._current(worker)
        if slot is not None and slot.phase == "ready":
            self._crash(slot, reason)
            self._settle()

    def on_leased(self, worker: int) -> None:
        """The worker computes nothing any more."""
        slot = self._current(worker)
        if slot is not None and slot.phase == "ready" and slot.lease == "asked":
            slot.lease = "held"
            self._settle()

    def on_unleased(self, worker: int, reason: str) -> None:
        """The worker refuses its lease, or its lease broke: nobody knows what it does, so it is ended."""
        slot = self._current(worker)
        if slot is not None and slot.phase == "ready" and slot.lease != "none":
            self._crash(slot, reason)
            self._settle()

    def on_heartbeat(self, worker: int, progress: int, pending: int) -> None:
        """Work done so far, and rows it still owes. A counter that moved, or nothing owed, is progress."""
        slot = self._current(worker)
        if slot is None:
            return
        slot.pending = pending
        if progress != slot.progress or pending == 0:
            slot.progress = progress
            slot.last_progress = self._fx.now()

    def on_footprint(self, worker: int, footprint_bytes: int) -> None:
        """What the worker's memory really is."""
        slot = self._current(worker)
        if slot is not None and slot is not self.spare and not self.closed:
            slot.footprint = footprint_bytes
            budget = self._models_bytes
            if self.spare.phase == "starting" and is_over_budget(self._processes(), budget):
                self._cancel_load(self.spare, "the models' real memory passes the budget")
                return
            victim = over_budget_victim(self.slots.values(), budget)
            if victim is not None:
                self._drain(self.slots[victim], "the models' real memory passes the budget", evicted=True)
                self._settle()

    def on_drained(self, worker: int, detail: str = "") -> None:
        """The drain is over, whole or timed out: what still runs is cut, and the worker stops."""
        slot = self._current(worker)
        if slot is None or slot.phase != "draining":
            return
        if slot.running:
            self._revoke_all(slot, error("shutting_down", "the model was stopped before this answer ended"))
        self._stop(slot, detail)

    def on_exit(self, worker: int, reason: str) -> None:
        """The process is gone, for whatever reason; only now is its memory free."""
        slot = self._by_worker.pop(worker, None)
        if slot is None:
            return
        # It may have been dead when it was adopted: that says nothing about the model. A fresh one will.
        was_dead_spare, slot.adopted = slot.adopted and slot.phase == "starting", False
        slot.worker, slot.told_go, slot.imported, slot.lease = 0, False, False, "none"
        slot.reserved = slot.footprint = slot.loaded_bytes = slot.total_bytes = 0
        slot.progress, slot.pending, slot.unload_before, slot.keep_alive_s = -1, 0, None, None
        if slot.phase in ("starting", "loading") and not was_dead_spare:
            self._fail(slot, reason)
        elif slot.phase in ("ready", "draining"):
            self._crash(slot, reason)
        slot.phase = "absent" if slot.reason is None else "failed"
        slot.since = self._fx.now()
        self._wants_spare = self._wants_spare or (slot is self.spare and self.limits.spare_bytes > 0)
        self._fx.log("gone", slot.name, reason)
        self._revive(slot, slot.since)
        self._settle()

    # ---- the clock ------------------------------------------------------------------------------------

    def on_tick(self) -> None:
        """Act on every time limit that has passed."""
        now, limits, gate = self._fx.now(), self.limits, self.leases.gate

        def passed(deadline: float | None) -> bool:
            return deadline is not None and deadline <= now

        for slot in self._processes():
            for ticket in [t for t in slot.waiting if passed(expires(slot, t, limits, gate))]:
                self._reject(slot, ticket, self._waited_too_long(slot, ticket, now - ticket.arrived))
            if not slot.waiting and slot.phase == "starting" and slot is not self.spare:
                self._cancel_load(slot, "nobody waits for it any more")
            elif passed(load_deadline(slot, limits)):
                self._fail(slot, f"no loading progress for {format_duration(limits.load_timeout_s)}")
            elif passed(stall_deadline(slot, limits)):
                what = "no progress" if slot.lease == "none" else "it did not let go of the GPU"
                self._crash(slot, f"stalled: {what} for {format_duration(limits.stall_timeout_s)}")
            self._revive(slot, now)
        self._settle()

    def next_deadline(self) -> float | None:
        """When `on_tick` should run next (effects' clock), or None."""
        if self.closed:
            slots = [s for s in self._processes() if s.works]
            return next_deadline(slots, self.limits)
        times = [next_deadline(self._processes(), self.limits, self.leases.gate)]
        if self._wants_spare and not self.spare.alive and self.spare.retry_at > self._fx.now():
            times.append(self.spare.retry_at)
        return min((t for t in times if t is not None), default=None)

    # ---- coming to rest ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Place memory, grant tickets, let idle models go, until nothing more follows."""
        if self.closed:
            return
        while self._shrink() | self._place() | self._grant() | self._retire() | self._lend():
            pass
        self._stock()

    def _shrink(self) -> bool:
        """Only a budget that was lowered can be passed: idle models leave until it holds again."""
        alive = [s for s in self._processes() if s.alive]
        kept = [s for s in alive if s.phase not in ("draining", "stopping")]
        if sum(s.reserved for s in kept) <= self._models_bytes:
            return False
        if self.spare in kept:
            self._cancel_load(self.spare, "the memory budget was lowered")
            return True
        idle = [s for s in kept if s.phase == "ready" and not s.pinned and not s.running and not s.waiting]
        if not idle:
            return False
        self._drain(min(idle, key=lambda s: s.last_used), "the memory budget was lowered", evicted=True)
        return True

    def _place(self) -> bool:
        move = place(self.slots.values(), self._models_bytes, self._next_ticket, self.spare, self.leases.gate)
        self._closing = move.closing
        for name, victims in move.blocked.items():
            slot = self.slots[name]
            if slot.evicts_from is None and any(v in move.closing for v in victims):
                slot.evicts_from = self._next_ticket
        for name in move.drain:
            victim = self.slots.get(name, self.spare)
            if victim.phase == "starting":
                self._cancel_load(victim, "an older request needs the memory")
            else:
                self._drain(victim, "evicted for another model", evicted=True)
        for name in move.start:
            self._start(self.slots[name], go=True, adopt=name == move.adopt)
        for name in move.wait:
            self._start(self.slots[name], go=False, adopt=name == move.adopt)
        for name in move.go:
            self._go(self.slots[name])
        return bool(move.drain or move.start or move.wait or move.go)

    def _grant(self) -> bool:
        """Grant what may run. True when an internal ticket ended: its model may be a victim now."""
        ended = False
        for slot in self.slots.values():
            held = min(
                self._closing.get(slot.name, self._next_ticket), slot.unload_before or self._next_ticket
            )
            held = min(max(held, slot.serves_before), self.leases.gate)
            while (
                slot.phase == "ready"
                and slot.waiting
                and slot.waiting[0].number < held
                and len(slot.running) < slot.spec.max_running
            ):
                ticket = slot.waiting.popleft()
                now = self._fx.now()
                if ticket.keep_alive_s is not None:
                    slot.keep_alive_s = ticket.keep_alive_s
                elif not ticket.internal:
                    slot.keep_alive_s = None
                slot.last_used = now
                if ticket.internal:
                    self._over(ticket)
                    ended = True
                else:
                    if not slot.works:
                        slot.last_progress = now  # what it did while idle says nothing about a stall
                    ticket.state, ticket.worker = "granted", slot.worker
                    slot.running[ticket.number] = ticket
                    slot.last_granted = now
                self._fx.grant(ticket)
        return ended

    def _retire(self) -> bool:
        """Drain models that were asked to go, or whose idle time is over."""
        now = self._fx.now()
        moved = False
        for slot in self.slots.values():
            if slot.phase != "ready":
                continue
            if slot.unload_before is not None and not slot.owes(slot.unload_before):
                self._drain(slot, "unloaded by request")
                moved = True
            elif (deadline := idle_deadline(slot)) is not None and deadline <= now:
                self._drain(slot, "idle")
                moved = True
        return moved

    def _lend(self) -> bool:
        """Bring the GPU to the job whose turn it is, a step at a time; without one, back to the models."""
        lease = self.leases.turn
        if lease is None:
            self._recall()
            return False
        if lease.state == "held":
            return False
        step = next_step(lease, self.slots.values(), self.spare, self.limits.budget_bytes)
        for name in step.evict:
            victim = self.slots.get(name, self.spare)
            if victim.phase == "starting":
                self._cancel_load(victim, f"{lease.holder} needs the memory")
            else:
                self._drain(victim, f"{lease.holder} needs the memory", evicted=True)
        if step.deny is not None:
            self._deny(lease, step.deny)
        lease.has_room = lease.has_room or step.reserve
        for name in step.ask:
            slot = self.slots[name]
            slot.lease, slot.lease_since = "asked", self._fx.now()
            self._fx.lease(slot.worker)
        if step.lend:
            lease.state = "held"
            self._fx.log("lease", lease.holder, "has the GPU")
            self._fx.lend(lease)
        return step != Step()

    def _recall(self) -> None:
        for slot in self.slots.values():
            if slot.lease != "none":
                slot.lease, slot.last_progress = "none", self._fx.now()
                if slot.phase == "ready":
                    self._fx.unlease(slot.worker)

    def _deny(self, lease: Lease, err: ApiError) -> None:
        self._end_lease(lease)
        self._fx.deny(lease, err)

    def _end_lease(self, lease: Lease) -> None:
        now = self._fx.now()
        for ticket in (t for slot in self.slots.values() for t in slot.waiting):
            if ticket.internal and ticket.number > lease.number:
                ticket.arrived = now
        self.leases.end(lease)

    @property
    def _models_bytes(self) -> int:
        """What the budget has for models beside the job that the GPU is lent to."""
        return self.limits.budget_bytes - self.leases.reserved

    def _stock(self) -> None:
        """Keep a spare while nobody waits for memory and there is room for one."""
        spare, now = self.spare, self._fx.now()
        if not self._wants_spare or spare.alive or spare.retry_at > now or self.leases.front is not None:
            return
        if any(s.waiting or s.phase in ("starting", "loading") for s in self.slots.values()):
            return
        used = sum(max(s.reserved, s.footprint) for s in self.slots.values())
        if used + self.limits.spare_bytes > self.limits.budget_bytes:
            return
        self._wants_spare = False
        self._new_worker(spare, now)
        spare.reserved = self.limits.spare_bytes
        self._fx.start_spare(spare.worker)

    def _new_worker(self, slot: Slot, now: float) -> None:
        slot.worker = self._next_worker
        self._next_worker += 1
        self._by_worker[slot.worker] = slot
        slot.phase, slot.since, slot.last_progress, slot.reason = "starting", now, now, None
        slot.told_go = slot.imported = slot.adopted = False

    def _start(self, slot: Slot, *, go: bool, adopt: bool) -> None:
        now = self._fx.now()
        if adopt:
            slot.worker, slot.imported = self.spare.worker, self.spare.imported
            self._by_worker[slot.worker] = slot
            slot.phase, slot.since, slot.last_progress, slot.reason = "starting", now, now, None
            slot.told_go, slot.adopted, slot.reserved = False, True, self.spare.reserved
            self.spare.phase, self.spare.worker, self.spare.reserved = "absent", 0, 0
            self._fx.adopt(slot.worker, slot.spec)
            if go:
                self._go(slot)
            return
        self._new_worker(slot, now)
        slot.reserved = slot.spec.planned_bytes if go else slot.spec.overhead_bytes
        self._fx.start(slot.worker, slot.spec, go)
        if go:
            self._launched(slot)

    def _go(self, slot: Slot) -> None:
        slot.reserved = slot.spec.planned_bytes
        slot.last_progress = self._fx.now()
        self._fx.go(slot.worker, slot.spec)
        self._launched(slot)

    def _launched(self, slot: Slot) -> None:
        slot.told_go, slot.evicts_from = True, None
        self.counters.loads += 1
        self._fx.log("load", slot.name, format_size(slot.reserved))

    def _drain(self, slot: Slot, why: str, *, evicted: bool = False) -> None:
        slot.phase, slot.since = "draining", self._fx.now()
        if slot.lease != "none":
            slot.lease, slot.last_progress = "none", slot.since  # that it rested is no stall
        if evicted:
            self.counters.evictions += 1
        self._fx.log("evict" if evicted else "drain", slot.name, why)
        self._fx.drain(slot.worker)

    def _stop(self, slot: Slot, why: str) -> None:
        slot.phase, slot.since = "stopping", self._fx.now()
        self._fx.log("stop", slot.name, why)
        self._fx.stop(slot.worker)

    def _cancel_load(self, slot: Slot, why: str) -> None:
        # Killed, not asked: nothing is there to save, and a process in the middle of a read can't listen.
        slot.phase, slot.since, slot.evicts_from = "stopping", self._fx.now(), None
        self._fx.log("cancel", slot.name, why)
        self._fx.kill(slot.worker)

    def _fail(self, slot: Slot, reason: str) -> None:
        """A load failed: every waiting ticket hears why, and the model rests."""
        backoff = LOAD_BACKOFF_S[min(slot.failures, len(LOAD_BACKOFF_S) - 1)]
        slot.failures += 1
        self._rest(slot, reason, backoff)

    def _crash(self, slot: Slot, reason: str) -> None:
        """A serving worker died or was given up: its streams end with an error, others go on."""
        now = self._fx.now()
        self.counters.crashes += 1
        slot.restarts += 1
        if slot.cooldown_s and now - (slot.crashes[-1] if slot.crashes else now) > COOLDOWN_MAX_S:
            slot.cooldown_s = 0.0
        slot.crashes.append(now)
        slot.revive = slot.pinned
        while slot.crashes[0] < now - CRASH_WINDOW_S:
            slot.crashes.popleft()
        self._revoke_all(slot, error("worker_crashed", f"the worker of model {slot.name!r} ended: {reason}"))
        self._fx.log("crash", slot.name, reason)
        if len(slot.crashes) >= CRASH_LIMIT:
            slot.cooldown_s = min(COOLDOWN_MAX_S, slot.cooldown_s * 2 or COOLDOWN_FIRST_S)
            self._rest(
                slot,
                f"crashed {len(slot.crashes)} times in {CRASH_WINDOW_S:.0f} s: {reason}",
                slot.cooldown_s,
            )
        else:
            self._end(slot)

    def _rest(self, slot: Slot, reason: str, rest_s: float) -> None:
        slot.reason, slot.retry_at, slot.evicts_from = reason, self._fx.now() + rest_s, None
        for ticket in list(slot.waiting):
            self._reject(slot, ticket, load_failed(slot.name, reason, rest_s))
        self._fx.log("failed", slot.name, reason)
        self._end(slot)

    def _end(self, slot: Slot) -> None:
        if slot.alive:
            slot.phase, slot.since = "stopping", self._fx.now()
            self._fx.kill(slot.worker)

    def _revive(self, slot: Slot, now: float) -> None:
        """A pinned model that crashed comes back by itself, after its cool-down."""
        if slot.revive and not slot.alive and not slot.waiting and slot.retry_at <= now and not self.closed:
            slot.revive = False
            self._queue(slot, now, internal=True)

    def _over(self, ticket: Ticket) -> None:
        ticket.state = "done"
        self.leases.leave(ticket.number)

    def _waited_too_long(self, slot: Slot, ticket: Ticket, waited_s: float) -> ApiError:
        front = self.leases.front
        if front is None or ticket.number < front.number:
            return queue_timeout(slot, waited_s)
        return gpu_leased(slot, waited_s, front.holder, front.state == "held")

    def _reject(self, slot: Slot, ticket: Ticket, err: ApiError) -> None:
        slot.waiting.remove(ticket)
        self._over(ticket)
        if not slot.waiting:
            slot.evicts_from = None
        self._fx.reject(ticket, err)

    def _revoke_all(self, slot: Slot, err: ApiError) -> None:
        for ticket in slot.running.values():
            self._over(ticket)
            self._fx.revoke(ticket, err)
        slot.running.clear()

    def _reject_unplaceable(self) -> None:
        """A new pin or budget may leave no room for ever: who waits hears it now, not at the time-out."""
        for lease in self.leases.asks():
            if not lease.has_room:
                try:
                    check_room(
                        lease.holder, lease.memory_bytes, self.slots.values(), self.limits.budget_bytes
                    )
                except ApiError as err:
                    self._deny(lease, err)
        for slot in self.slots.values():
            loads = slot.told_go and slot.phase in ("starting", "loading", "ready")
            if slot.waiting and not loads:
                try:
                    check_fit(slot, self.slots.values(), self.limits.budget_bytes)
                except ApiError as err:
                    for ticket in list(slot.waiting):
                        self._reject(slot, ticket, err)
                    if slot.phase == "starting":
                        self._cancel_load(slot, "there is no room for it any more")

    def _slot(self, spec: ModelSpec) -> Slot:
        slot = self.slots.get(spec.name)
        if slot is None:
            slot = self.slots[spec.name] = Slot(spec.name, spec, since=self._fx.now())
        elif slot.spec is not spec:
            if slot.phase == "failed" and slot.spec.stamp != spec.stamp:
                slot.phase, slot.reason, slot.failures = "absent", None, 0
            slot.spec = spec
        return slot

    def _current(self, worker: int) -> Slot | None:
        return self._by_worker.get(worker)


def _unloaded(name: str) -> ApiError:
    return error("load_failed", f"model {name!r} was unloaded by request", retry_after_s=RETRY_FULL_S)
