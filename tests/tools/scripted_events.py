"""A worker's own events as JSON, for a script that says what a scripted worker's answers are made of.

`told(Reasoning("…"), Text("…"), Finish("stop"))` is what script.json's `events` holds: each event's fields,
with the name of its class as `type`. A Failure has `code` and `message` in place of its error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from mlxpool.shared.errors import error
from mlxpool.worker.text.events import (
    Event,
    Failure,
    Finish,
    Logprobs,
    Prefilled,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)

_KINDS = {
    kind.__name__: kind
    for kind in (
        Text, Reasoning, ToolCallStart, ToolCallArguments, ToolCallEnd, Prefilled, Logprobs, Usage, Finish
    )
}  # fmt: skip


def told(*events: Event) -> list[dict[str, Any]]:
    """These events for a script."""
    return [
        {"type": "Failure", "code": event.error.code, "message": event.error.message}
        if isinstance(event, Failure)
        else {"type": type(event).__name__, **msgspec.to_builtins(event)}
        for event in events
    ]


def events_of(script: Iterable[Mapping[str, Any]]) -> list[Event]:
    """A script's events. Raises ValueError that names the first which is none."""
    return [_event(place, dict(fields)) for place, fields in enumerate(script)]


def _event(place: int, fields: dict[str, Any]) -> Event:
    kind = fields.pop("type", None)
    try:
        if kind == "Failure":
            return Failure(error(fields["code"], fields["message"]))
        event: Event = msgspec.convert(fields, _KINDS[kind])
        return event
    except (KeyError, msgspec.ValidationError) as err:
        raise ValueError(f"events[{place}]: {kind!r} with {fields} is no event: {err}") from err
