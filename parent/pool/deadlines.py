"""When something about a slot is overdue, on the effects' clock; None where nothing can be."""

from __future__ import annotations

from .contract import Limits
from .leases import OPEN
from .state import Slot, Ticket


def expires(slot: Slot, ticket: Ticket, limits: Limits, gate: int = OPEN) -> float | None:
    """When a queued ticket has waited too long. Not while its model loads: load_timeout watches over that.

    gate: tickets from there on wait for no load. A load that was asked for by name, or that brings a pinned
    model back, has nobody to turn away, and a job may take hours: its time begins after the job.
    """
    if ticket.internal and ticket.number >= gate:
        return None
    loading = slot.phase == "loading" or (slot.phase == "starting" and slot.told_go)
    return None if loading and ticket.number < gate else ticket.arrived + limits.queue_timeout_s


def load_deadline(slot: Slot, limits: Limits) -> float | None:
    """When a start or a load without progress is given up. Waiting for `go` is not the worker's fault."""
    if slot.phase == "loading" or (slot.phase == "starting" and (slot.told_go or not slot.imported)):
        return slot.last_progress + limits.load_timeout_s
    return None


def stall_deadline(slot: Slot, limits: Limits) -> float | None:
    """When a worker with work and no progress is given up, whether or not anybody waits for it still.

    One that computes nothing because it was asked to is none; one that does not even answer that is.
    """
    if slot.phase == "ready" and slot.lease != "none":
        return slot.lease_since + limits.stall_timeout_s if slot.lease == "asked" else None
    if slot.phase in ("ready", "draining") and slot.works:
        return slot.last_progress + limits.stall_timeout_s
    return None


def idle_deadline(slot: Slot) -> float | None:
    """When a model that nobody uses leaves."""
    if slot.phase != "ready" or slot.pinned or slot.running or slot.waiting:
        return None
    ttl = slot.idle_ttl_s
    return None if ttl is None else slot.last_used + ttl


def next_deadline(slots: list[Slot], limits: Limits, gate: int = OPEN) -> float | None:
    """The earliest of all of them."""
    times: list[float | None] = []
    for slot in slots:
        times.extend(expires(slot, ticket, limits, gate) for ticket in slot.waiting)
        times += [load_deadline(slot, limits), stall_deadline(slot, limits), idle_deadline(slot)]
        if slot.revive and not slot.alive and not slot.waiting:
            times.append(slot.retry_at)
    return min((t for t in times if t is not None), default=None)
