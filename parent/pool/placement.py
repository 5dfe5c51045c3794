"""Who may start and who must go: the memory decision, as a pure function of the slots.

`place` walks the models that have waiting tickets in the order of their oldest ticket (first come, first
served over all models) and keeps three sums: what is free now, what is being released, and what is promised
to those ahead in the line. A model starts when its plan fits what is free without touching a promise. When it
needs room, victims are taken from ready, unpinned models: idle ones first, least recently used first. Idle
victims are drained at once; busy ones are *closing*: tickets that were queued for them already are served,
later ones wait behind the eviction. Nothing here is latched: a victim that stops being needed reopens with
the next call. Tickets behind the gate (leases.py) are not there: they start nothing, and nothing waits for
them. It decides and changes nothing; `Scheduler` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .leases import OPEN
from .state import SPARE, Slot


@dataclass
class Placement:
    """What `place` decided.

    start: models to start now with their whole plan reserved. wait: models that may start a process and
    import (their overhead fits) but touch no weights yet. adopt: the one of these two that takes the spare.
    go: starting models whose room is there now. drain: idle victims, and imports that must yield. closing:
    busy victim → first ticket number that waits behind the eviction. blocked: model → those it needs gone
    before it can load.
    """

    start: list[str] = field(default_factory=list)
    wait: list[str] = field(default_factory=list)
    adopt: str | None = None
    go: list[str] = field(default_factory=list)
    drain: list[str] = field(default_factory=list)
    closing: dict[str, int] = field(default_factory=dict)
    blocked: dict[str, tuple[str, ...]] = field(default_factory=dict)


def place(
    slots: Iterable[Slot], budget: int, next_ticket: int, spare: Slot | None = None, gate: int = OPEN
) -> Placement:
    """The next moves for these slots within `budget` bytes.

    next_ticket: the number after the newest. spare: a worker without a model, whose bytes become part of
    the plan of the first model that starts, and which goes before any model does. gate: only tickets
    numbered below it count.
    """
    slots = [*slots, spare] if spare is not None and spare.alive else list(slots)
    adoptable = spare.reserved if spare is not None and spare.phase == "starting" else 0
    out = Placement()
    demands = sorted(
        (s for s in slots if s.waiting and s.waiting[0].number < gate and s.phase != "ready"),
        key=lambda s: s.waiting[0].number,
    )
    excess = sum(max(0, s.footprint - s.reserved) for s in slots if s.alive)
    free = budget - sum(s.reserved for s in slots) - excess
    releasing = sum(s.reserved for s in slots if s.phase in ("draining", "stopping"))
    promised = 0
    taken: set[str] = set()

    for slot in demands:
        plan = slot.spec.planned_bytes
        if slot.phase == "loading" or (slot.phase == "starting" and slot.told_go):
            continue
        if slot.phase in ("draining", "stopping"):
            promised += plan  # it starts again once it is gone; nobody younger takes its room
            continue
        adopts = adoptable if slot.phase != "starting" else 0
        need = slot.claim if slot.phase == "starting" else plan - adopts
        if need <= free and need <= free + releasing - promised:
            (out.go if slot.phase == "starting" else out.start).append(slot.name)
            free -= need
            if adopts:
                out.adopt, adoptable, taken = slot.name, 0, taken | {SPARE}
            continue
        shortfall = need - (free + releasing - promised)
        if shortfall > 0:
            # Never below its own oldest ticket: those who came before that one are served first in any case.
            barrier = next_ticket if slot.evicts_from is None else slot.evicts_from
            barrier = max(barrier, slot.waiting[0].number)
            victims = _victims(slots, slot, shortfall, barrier, gate, taken | {SPARE} if adopts else taken)
            taken.update(v.name for v in victims)
            if any(v.phase == "ready" and v.owes(barrier, gate) for v in victims):
                out.closing.update((v.name, barrier) for v in victims if v.phase == "ready")
                out.blocked[slot.name] = tuple(v.name for v in victims)
                releasing += sum(v.reserved for v in victims)
                promised += need
                continue
            out.drain.extend(v.name for v in victims)
            releasing += sum(v.reserved for v in victims)
            if not victims:
                # Nothing may go yet (others load, or are pinned): hold the place in the line.
                out.blocked[slot.name] = ()
                promised += need
                continue
        out.blocked[slot.name] = tuple(s.name for s in slots if s.phase in ("draining", "stopping"))
        if adopts:
            out.wait.append(slot.name)
            out.adopt, adoptable, taken = slot.name, 0, taken | {SPARE}
        elif slot.phase != "starting" and 0 < slot.spec.overhead_bytes <= free and not out.closing:
            # Importing while the victim drains is what makes a swap cost the weights alone. Behind a busy
            # victim it would only hold memory for an unknown time.
            out.wait.append(slot.name)
            free -= slot.spec.overhead_bytes
            need -= slot.spec.overhead_bytes
        promised += need
    return out


def _victims(
    slots: list[Slot], demand: Slot, shortfall: int, barrier: int, gate: int, taken: set[str]
) -> list[Slot]:
    """Least recently used models that free at least `shortfall` bytes; none if all together can't.

    Besides ready, unpinned models these are workers of younger demands that were let import ahead of their
    turn: without weights they cost nothing to stop.
    """

    def rank(slot: Slot) -> tuple[int, float]:
        if slot.phase == "starting":
            return (0, 0.0)
        # A busy model is ordered by its last grant: a closing one gets none, so the choice can't flip back
        # and forth between two busy models for ever.
        return (2, slot.last_granted) if slot.owes(barrier, gate) else (1, slot.last_used)

    def may_go(slot: Slot) -> bool:
        if slot is demand or slot.name in taken:
            return False
        if slot.phase == "starting":
            return not slot.told_go and (
                not slot.waiting or slot.waiting[0].number > demand.waiting[0].number
            )
        return slot.phase == "ready" and not slot.pinned

    return enough(sorted(filter(may_go, slots), key=rank), shortfall)


def enough(candidates: Iterable[Slot], shortfall: int) -> list[Slot]:
    """Of these, in their order, who frees at least `shortfall` bytes; none if all together can't."""
    chosen: list[Slot] = []
    freed = 0
    for slot in candidates:
        if freed >= shortfall:
            break
        chosen.append(slot)
        freed += slot.reserved
    if freed < shortfall:
        return []
    # An early small victim may have become needless once a later large one was added.
    for slot in list(chosen):
        if freed - slot.reserved >= shortfall:
            chosen.remove(slot)
            freed -= slot.reserved
    return chosen


def is_over_budget(slots: Iterable[Slot], budget: int) -> bool:
    """Whether what processes hold or were promised, whichever is more, passes the budget."""
    return sum(max(s.reserved, s.footprint) for s in slots if s.alive) > budget


def over_budget_victim(slots: Iterable[Slot], budget: int) -> str | None:
    """The idle model to evict because real footprints pass the budget, or None.

    The last resident model is kept: evicting it would only load it again for its next request.
    """
    resident = [s for s in slots if s.alive]
    if len(resident) < 2 or not is_over_budget(resident, budget):
        return None
    idle = [s for s in resident if s.phase == "ready" and not s.pinned and not s.running and not s.waiting]
    return min(idle, key=lambda s: s.last_used).name if idle else None
