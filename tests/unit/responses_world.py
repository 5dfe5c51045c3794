"""A writer of Responses and what it is given, for its tests: events, and the official client's reading."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlxpool.shared.api.response_tools import ToolName
from mlxpool.shared.api.responses import ResponseOwn
from mlxpool.worker.text.events import (
    Event,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from mlxpool.worker.wire.responses import ResponseAnswer
from mlxpool.worker.wire.writer import Identity, Said

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
NAMES = {
    "ns__get": ToolName("get", "ns"),
    "patch": ToolName("patch", custom=True),
    "look": ToolName("look"),
}
USED = Usage(7, 5, 2, "batch", 3)


def writer(summary: bool = False, sealed: bool = False, **fields: Any) -> ResponseAnswer:
    own = ResponseOwn(fields, NAMES, summary, sealed)
    return ResponseAnswer(Identity("resp_1", 1700000000, "m", "resp_0"), own, clock=lambda: 1700000009.7)


def said(events: Sequence[Event]) -> list[Said]:
    return [(0, event) for event in events]


def parsed(data: bytes) -> list[dict[str, Any]]:
    """The events in these bytes, which must be whole ones that the official client takes."""
    assert data == b"" or data.endswith(b"\n\n")
    events = []
    for whole in data.split(b"\n\n")[:-1]:
        kind, body = whole.split(b"\n")
        event = json.loads(body.removeprefix(b"data: "))
        assert kind == b"event: " + event["type"].encode()
        assert body.startswith(b'data: {"type":"%b","sequence_number":' % event["type"].encode())
        _EVENTS.validate_python(event)
        events.append(event)
    return events


def whole(answer: ResponseAnswer, events: Sequence[Event]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(answer.whole(said(events)))
    Response.model_validate(body)
    return body


def called(index: int, name: str, *pieces: str, call_id: str = "") -> list[Event]:
    start = ToolCallStart(index, call_id or f"call_{index}", name)
    return [start, *(ToolCallArguments(index, piece) for piece in pieces), ToolCallEnd(index)]


def likely(token: str, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(token, token.encode(), logprob)
