"""What every protocol's writer can do, and what identifies an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from mlxpool.worker.text.events import Event

# A row's event with the place of its row among the request's.
Said = tuple[int, Event]


class Identity(msgspec.Struct, frozen=True):
    """id: of the answer, as clients see it. created: unix seconds. model: the name that was asked for.
    previous: of a response, the one it goes on from. request_id: for errors, where the protocol has a place
    for it."""

    id: str
    created: int
    model: str
    previous: str | None = None
    request_id: str | None = None


class Writer(Protocol):
    """One answer, whole or streamed: feed it the rows' events in order. No call is made after `ended`."""

    @property
    def ended(self) -> bool:
        """Whether the last byte of the stream has been handed out."""

    def opening(self) -> bytes:
        """The stream's first events, known before anything has been said; b"" where there are none."""

    def keep_alive(self) -> bytes:
        """An event that says nothing, as this protocol's clients take it."""

    def write(self, said: Iterable[Said]) -> bytes:
        """Whole SSE events for these; what came together goes out together. A Failure ends the stream."""

    def whole(self, said: Iterable[Said]) -> bytes:
        """The JSON body of a complete answer. Raises the ApiError of a Failure among the events."""
