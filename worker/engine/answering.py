"""From a token that became known to what the row's client hears. Owned by the engine thread."""

from __future__ import annotations

from mlxpool.shared.errors import ApiError, error
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.engine import logprobs
from mlxpool.worker.engine.group import Sampled
from mlxpool.worker.engine.row import Row
from mlxpool.worker.text.events import (
    Event,
    Finish,
    FinishReason,
    Lane,
    Prefilled,
    Reasoning,
    Speculation,
    TextEvent,
    Usage,
)


class GrammarFault(Exception):
    """A token was sampled that the row's grammar has no place for: a fault of ours."""


def events_of(sampled: Sampled, lane: Lane) -> tuple[list[Event], bool]:
    """The token's events, and whether the row ends with it. An eos wins over the length limit.

    The token goes to the row's ids, to its constraint and to its text. Raises GrammarFault, the constraint's
    ApiError, and what the text machines raise.
    """
    row, token = sampled.row, sampled.token
    lane = "turns" if row.took_turns else lane
    row.emitted += 1
    row.ids.append(token)
    if row.constraint is not None and not row.constraint.accept(token):
        raise GrammarFault(f"the grammar has no place for token {token} at {row.emitted} of its answer")
    events: list[Event] = []
    if not row.told_prefilled:
        row.told_prefilled = True
        events.append(Prefilled(len(row.plan.ids), row.cached_tokens or 0, lane))
    reason: FinishReason | None = None
    if token in row.plan.eos_ids:
        reason = "stop"
    else:
        said = row.text.push(token)
        _count(row, said)
        if sampled.reading is not None and row.token_bytes is not None:
            entry = logprobs.event(token, sampled.reading, row.token_bytes, row.text.added_chars)
            events += row.text.told(entry)
        events += said
        if row.text.over or (row.constraint is not None and row.constraint.over):
            reason = "stop"
        elif row.emitted >= row.plan.max_tokens:
            reason = "length"
    if reason is None:
        return events, False
    if not row.text.over:
        said = row.text.flush(cut=reason == "length")
        _count(row, said, more=0)
        events += [*row.text.told(), *said]
        reason = "stop" if row.text.over else reason
    if reason == "stop" and row.text.called:
        reason = "tool_calls"
    events += [
        Usage(
            len(row.plan.ids),
            row.emitted,
            row.cached_tokens or 0,
            lane,
            row.reasoning_tokens,
            Speculation(row.drafted, row.accepted, row.target_calls) if row.speculates else None,
        ),
        Finish(reason, row.text.stop),
    ]
    return events, True


def _count(row: Row, said: list[TextEvent], more: int = 1) -> None:
    """The tokens of reasoning. One that says nothing yet belongs to what is heard next; more: new tokens."""
    row.silent_tokens += more
    if not said:
        return
    if isinstance(said[0], Reasoning):
        row.reasoning_tokens += row.silent_tokens
    row.silent_tokens = 0


def failure_of(err: Exception) -> ApiError:
    """What a client is told of a fault."""
    # One that a row's own grammar gave is for its client.
    if isinstance(err, ApiError):
        return err
    if isinstance(err, ReadFault):
        return error("internal_error", f"an expert of this model can't be read: {err}")
    return error("internal_error", f"the engine failed on this request: {type(err).__name__}: {err}")
