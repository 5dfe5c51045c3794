"""One answer as it passes: its end is noticed before it is sent, and made where it does not come.

A stream's bytes are held, not read; only the last event of each piece is looked at. One that breaks off,
fails or is cancelled is read afterwards, off the loop, for what it had said until then. Held bytes are
bounded: a longer stream is read while it runs, a piece at a time, and let go.

Owned by whoever carries the answer, on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from mlxpool.shared.api import response_events, response_object
from mlxpool.shared.errors import ApiError

from . import streams
from .folding import Folding
from .records import MAX_EVENT_BYTES

# Twice what a stored stream may have: a follower that comes late finds all of any usual stream.
HELD_BYTES = 16 * 2**20

# What becomes of a final response: its object and its stream's events, None where they were not all held.
Keep = Callable[[bytes, tuple[bytes, ...] | None], None]


class Recorder:
    """keep: told once, before the client hears the end. begun: makes the response's object before anything
    was said, for a stream that ends before its worker said one; set by whoever knows.

    pieces: of the stream, as passed. dropped: how many pieces before them are no longer held. failing: set by
    whoever knows why the stream ends badly. response: the final object, once there is one.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self.begun: Callable[[], dict[str, Any]] = dict
        self._folding = Folding()
        self._reading = asyncio.Lock()
        self._held_bytes = 0
        self.pieces: list[bytes] = []
        self.dropped = 0
        self.failing: ApiError | None = None
        self.response: bytes | None = None

    def has_ended(self) -> bool:
        """Whether there is a final response."""
        return self.response is not None

    async def passing(self, data: bytes) -> bytes:
        """These events, which are sent next; others in their place where the stream fails."""
        if self.failing is not None:
            return await self.end("failed", self.failing)
        if self._held_bytes > HELD_BYTES:
            await self._let_go()
        self.noted(data)
        return data

    def noted(self, data: bytes) -> bool:
        """`passing` where nothing has to be waited for, which is nearly always; False, and nothing done,
        where something has."""
        if self.failing is not None or self._held_bytes > HELD_BYTES:
            return False
        self.pieces.append(data)
        self._held_bytes += len(data)
        if (final := streams.final_response(data)) is not None:
            self._ended(final)
        return True

    def whole(self, body: bytes) -> None:
        """An answer that is no stream."""
        self.response = body
        self._keep(body, None)

    async def end(self, status: str, err: ApiError | None = None) -> bytes:
        """End a stream that did not end by itself: the event that says so. status: failed or cancelled.
        b"" where it had ended after all."""
        if self.has_ended():
            return b""
        await asyncio.shield(self._read(self.pieces))
        if self.has_ended():
            return b""
        folding = self._folding
        begun = folding.response if folding.response is not None else self.begun()
        response = {**begun, "status": status, "output": folding.output()}
        if err is not None:
            response["error"] = response_object.failure(err)
        first = response_events.event("response.created", 0, response=begun) if folding.number < 0 else b""
        number = max(0, folding.number) + 1
        last = first + response_events.event(response_events.terminal_kind(status), number, response=response)
        self.pieces.append(last)
        self._ended(msgspec.json.encode(response))
        return last

    def events(self) -> tuple[bytes, ...] | None:
        """The stream so far, None where it is not held, or too long to be stored."""
        if self.dropped or not self.pieces or self._held_bytes > MAX_EVENT_BYTES:
            return None
        return tuple(self.pieces)

    def _ended(self, response: bytes) -> None:
        self.response = response
        self._keep(response, self.events())

    async def _let_go(self) -> None:
        pieces, self.pieces = self.pieces, []
        self.dropped += len(pieces)
        self._held_bytes = 0
        await asyncio.shield(self._read(pieces))

    async def _read(self, pieces: list[bytes]) -> None:
        # Shielded: a client that leaves in the middle of it must not leave half of a reading behind.
        async with self._reading:
            await asyncio.to_thread(lambda: self._folding.feed(b"".join(pieces)))
