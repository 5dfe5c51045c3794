"""How the GPU gets from the models to a job whose turn it is: the next step, as a pure function of the slots.

First what is on its way (a load, a drain, a stop) comes to rest; then the job's memory is made free and
reserved; then every model that is loaded is asked to compute nothing; then the job has it. A worker that only
imports touches no weights and holds nobody up, and goes first where memory is short. It decides and changes
nothing; `Scheduler` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.units import format_size

from .leases import Lease
from .placement import enough
from .state import SPARE, Slot


@dataclass
class Step:
    """What `next_step` decided; nothing in it where there is something to wait for.

    evict: models that leave, "" the spare. reserve: the job's memory is there. ask: ready models that are to
    give the GPU up. lend: all have; the job may begin. deny: it can't ever.
    """

    evict: list[str] = field(default_factory=list)
    reserve: bool = False
    ask: list[str] = field(default_factory=list)
    lend: bool = False
    deny: ApiError | None = None


def next_step(lease: Lease, slots: Iterable[Slot], spare: Slot, budget: int) -> Step:
    """The next step for a lease whose turn it is and that nobody has yet, within `budget` bytes."""
    slots = [s for s in (*slots, spare) if s.alive]
    if any(_is_moving(slot) for slot in slots):
        return Step()
    if not lease.has_room:
        try:
            check_room(lease.holder, lease.memory_bytes, slots, budget)
        except ApiError as err:
            return Step(deny=err)
        if victims := _victims(lease, slots, budget):
            return Step(evict=victims)
        if lease.memory_bytes > budget - sum(s.reserved for s in slots):
            return Step()
        return Step(reserve=True)
    ready = [s for s in slots if s.phase == "ready"]
    if ask := [s.name for s in ready if s.lease == "none"]:
        return Step(ask=ask)
    return Step(lend=all(s.lease == "held" for s in ready))


def check_room(holder: str, memory_bytes: int, slots: Iterable[Slot], budget: int) -> None:
    """Raise the ApiError of a job that can't get its memory however long it waits."""
    needs = f"{holder} needs {format_size(memory_bytes)} of memory"
    whole = f"the memory budget of {format_size(budget)}"
    if memory_bytes > budget:
        raise error("model_too_large", f"{needs}, more than {whole}; raise [pool] memory_budget")
    pinned = [s for s in slots if s.pinned and s.alive]
    held = sum(s.reserved for s in pinned)
    if memory_bytes + held > budget:
        names = ", ".join(sorted(s.name for s in pinned))
        raise error(
            "model_too_large",
            f"{needs}, but pinned models ({names}) hold {format_size(held)} of {whole}; unpin one",
        )


def _is_moving(slot: Slot) -> bool:
    """Whether it is about to hold weights, or to let go of them."""
    return slot.phase in ("loading", "draining", "stopping") or (slot.phase == "starting" and slot.told_go)


def _victims(lease: Lease, slots: list[Slot], budget: int) -> list[str]:
    """Who goes for its memory: who only imports, then idle models, least recently used first."""
    excess = sum(max(0, s.footprint - s.reserved) for s in slots)
    shortfall = lease.memory_bytes - (budget - sum(s.reserved for s in slots) - excess)
    if shortfall <= 0:
        return []

    def rank(slot: Slot) -> tuple[int, float]:
        if slot.phase == "starting":
            return (0 if slot.name == SPARE else 1, 0.0)
        return (2, slot.last_used)

    candidates = sorted((s for s in slots if not s.pinned or s.phase == "starting"), key=rank)
    # Where that is too little, pinned models hold more than their plans say: no reason to wait for ever.
    return [s.name for s in enough(candidates, shortfall) or candidates]
