"""Streams as lists that a table can be compared with: what differs from run to run is named by its place.

An id that the server drew becomes its prefix and its number in the order of appearance ("msg_1"), so that two
places with one id have one name; times become 0.
"""

from __future__ import annotations

import re
import time
from typing import Any

import httpx2

from tests.clients.conftest import ANSWER_TIMEOUT_S
from tests.tools import sse
from tests.tools.served import Served

_DRAWN = re.compile(r"(chatcmpl-|cmpl-|msg_|resp_|rs_|fc_|ctc_)[0-9a-f]{16,}(_\d+)?")
_TIMES = ("created", "created_at", "completed_at")


class Named:
    """Names for the ids of one stream or answer."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, value: Any) -> Any:
        """The same value, its ids and times named."""
        if isinstance(value, dict):
            return {key: _timed(key, inner) if key in _TIMES else self(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self(inner) for inner in value]
        if isinstance(value, str) and (drawn := _DRAWN.fullmatch(value)):
            prefix = drawn[1]
            if value not in self._names:
                self._counts[prefix] = self._counts.get(prefix, 0) + 1
                self._names[value] = f"{prefix}{self._counts[prefix]}"
            return self._names[value]
        return value


def _timed(key: str, value: Any) -> Any:
    if value is None:
        return None
    assert abs(value - time.time()) < 3600, f"{key} = {value}"
    return 0


def typed(stream: Any) -> list[Any]:
    """All events of a client's stream, with the fields that were sent and no others."""
    return Named()([event.model_dump(mode="json", exclude_unset=True, by_alias=True) for event in stream])


def raw(served: Served, path: str, body: dict[str, Any]) -> list[Any]:
    """The same events off the wire. Whatever has a type is also named by it."""
    answer = httpx2.post(served.url + path, json={**body, "stream": True}, timeout=ANSWER_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    events = sse.read(answer.content, whole=False)
    for event in events:
        if event.data != sse.DONE:
            assert event.name == event.json().get("type", "")
    return [sse.DONE if event.data == sse.DONE else event.json() for event in events]


def named(events: list[Any]) -> Any:
    return Named()(events)


def hear(stream: Any, heard: list[Any]) -> None:
    """Reads a client's stream to its end; what came before it raised is in `heard`."""
    for event in stream:
        heard.append(event)
