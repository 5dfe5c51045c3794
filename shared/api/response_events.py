"""Events of a response's stream, and a finished response as the stream that it could have been.

An event's JSON begins with `type` and `sequence_number`, in this order: the parent, which may have said the
first events of a stream itself, moves the numbers of the rest by those bytes alone. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from mlxpool.shared.api.response_items import retold
from mlxpool.shared.api.response_object import unsaid

# No client's types have a `response.cancelled`: a response that was cancelled ended before it was complete,
# and its object says that it was cancelled.
_TERMINAL = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",
}

# A snapshot with a long list of tools is the largest event; an encoder keeps no state between two.
_ENCODER = msgspec.json.Encoder()


def event(kind: str, sequence: int, **fields: Any) -> bytes:
    """One SSE event."""
    data = _ENCODER.encode({"type": kind, "sequence_number": sequence, **fields})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def terminal_kind(status: str) -> str:
    """The kind of the event that ends the stream of a response with this final status. KeyError for a status
    that is none."""
    return _TERMINAL[status]


def replay(response: Mapping[str, Any]) -> Iterator[bytes]:
    """The events of a response, made of its object alone, numbered from 0. One that has not ended has no
    terminal event."""
    begun = unsaid(response)
    yield event("response.created", 0, response=begun)
    yield event("response.in_progress", 1, response=begun)
    sequence = 2
    for output_index, item in enumerate(response["output"]):
        for kind, fields in retold(item, output_index):
            yield event(kind, sequence, **fields)
            sequence += 1
    if response["status"] in _TERMINAL:
        yield event(terminal_kind(response["status"]), sequence, response=response)


def output_as_input(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A response's output as input of the next turn. A call that was cut is left out: nobody could make it.
    So are log-probabilities, and what says a second time what is there in clear."""
    return [
        _as_input(item)
        for item in items
        if not (str(item.get("type")).endswith("_call") and item.get("status") == "incomplete")
    ]


def _as_input(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if not isinstance(content, list):
        return dict(item)
    if item.get("type") == "reasoning" and content:
        return {name: value for name, value in item.items() if name != "encrypted_content"}
    bare = [
        {name: value for name, value in part.items() if name != "logprobs"}
        if isinstance(part, Mapping)
        else part
        for part in content
    ]
    return {**item, "content": bare}
