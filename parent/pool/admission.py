"""Whether a request may queue for a model at all, and what it is told when it may not.

Pure questions about slots. What would be hopeless is refused at once with the numbers; what may pass is left
to wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.units import format_count, format_duration, format_size

from .state import Slot

# A full queue empties at the pace of answers, which take seconds: sooner retries would only be refused again.
RETRY_FULL_S = 5.0
RETRY_TIMEOUT_S = 10.0
RETRY_FAULT_S = 1.0


def check_admission(
    slot: Slot, slots: Iterable[Slot], budget_bytes: int, now: float, *, internal: bool
) -> None:
    """Raise the ApiError with which a new ticket for this model is refused, if it is.

    An internal ticket (a load asked for by name) has no client to turn away: the queue's limit is not for it.
    """
    if slot.phase in ("absent", "failed"):
        if slot.spec.fault is not None:
            raise load_failed(slot.name, slot.spec.fault, RETRY_FAULT_S)
        check_fit(slot, slots, budget_bytes)
    if slot.reason is not None and slot.retry_at > now:
        raise load_failed(slot.name, slot.reason, slot.retry_at - now)
    queued = sum(not t.internal for t in slot.waiting)
    if queued >= slot.spec.queue_limit and not internal:
        raise error(
            "queue_full",
            f"model {slot.name!r} has {format_count(queued, 'request')} waiting, its limit; try again later",
            retry_after_s=RETRY_FULL_S,
        )


def check_fit(slot: Slot, slots: Iterable[Slot], budget_bytes: int) -> None:
    """Raise `model_too_large` when the model can't get its memory however long it waits."""
    spec = slot.spec
    if spec.too_large is not None:
        raise error("model_too_large", spec.too_large, param="model")
    needs = f"model {slot.name!r} needs {format_size(spec.planned_bytes)}"
    budget = f"the memory budget of {format_size(budget_bytes)}"
    if spec.planned_bytes > budget_bytes:
        raise error(
            "model_too_large",
            f"{needs}, more than {budget}; raise [pool] memory_budget or lower the model's context",
            param="model",
        )
    pinned = [s for s in slots if s.pinned and s.alive and s is not slot]
    held = sum(s.reserved for s in pinned)
    if spec.planned_bytes + held > budget_bytes:
        names = ", ".join(sorted(s.name for s in pinned))
        raise error(
            "model_too_large",
            f"{needs}, but pinned models ({names}) hold {format_size(held)} of {budget}; unpin one",
            param="model",
        )


def load_failed(name: str, reason: str, retry_s: float) -> ApiError:
    """The 503 for a model that can't be loaded now."""
    return error("load_failed", f"model {name!r} can't be loaded: {reason}", retry_after_s=max(retry_s, 0.0))


def queue_timeout(slot: Slot, waited_s: float) -> ApiError:
    """The 503 for a request that has waited too long, saying for what."""
    if slot.phase == "ready":
        why = f"none of its rows is free ({slot.spec.max_running})"
    else:
        why = "other models hold the memory it needs"
    return error(
        "queue_timeout",
        f"waited {format_duration(waited_s)} for model {slot.name!r}: {why}",
        retry_after_s=RETRY_TIMEOUT_S,
    )


def gpu_leased(slot: Slot, waited_s: float, holder: str, held: bool) -> ApiError:
    """The 503 for a request that has waited too long behind a job that has the GPU for itself, or will."""
    why = f"the GPU is held by {holder}" if held else f"{holder} waits for the GPU before it"
    return error(
        "gpu_leased",
        f"waited {format_duration(waited_s)} for model {slot.name!r}: {why}",
        retry_after_s=RETRY_TIMEOUT_S,
    )
