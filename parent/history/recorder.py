"""One answer as it passes: its end is noticed before it is sent, and made where it does not come.

A stream's bytes are held, not read; only the last event of each piece is looked at. One that breaks off,
fails or is cancelled is read afterwards, off the loop, for what it had said until then. Held bytes are
bounded: a longer stream is read while it runs, a piece at a time, and let go. What can't be read of it is
logged and left out: every stream has an end, and it is kept.

Owned by whoever carries the answer, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from mlxpool.shared.api import response_events, response_object
from mlxpool.shared.errors import ApiError

from . import streams
from .folding import Folding
from .records import MAX_EVENT_BYTES

logger = logging.getLogger("mlxpool.history")

# Twice what a stored stream may have: a follower that comes late finds all of any usual stream.
HELD_BYTES = 16 * 2**20

# What becomes of a final response: its object and its stream's events, None where they were not all held.
Keep = Callable[[bytes, tuple[bytes, ...] | None], None]


class Recorder:
    """keep: told once, before the client hears the end. begun: makes the response's object before anything
    was said, for a stream that ends before its worker said one; set by whoever knows.

    pieces: of the stream, as passed. held_bytes: theirs. dropped: how many pieces before them are no longer
    held. response: the final object, once there is one.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self.begun: Callable[[], dict[str, Any]] = dict
        self._folding = Folding()
        self._reading = asyncio.Lock()
        self._read_pieces = 0  # of all that passed
        self._ends_as: tuple[str, ApiError | None] | None = None
        self.held_bytes = 0
        self.pieces: list[bytes] = []
        self.dropped = 0
        self.response: bytes | None = None

    def has_ended(self) -> bool:
        """Whether there is a final response."""
        return self.response is not None

    async def passing(self, data: bytes) -> bytes:
        """These events, which are sent next; others in their place where they end with an error event."""
        if self.held_bytes > HELD_BYTES:
            await self._let_go()
        if self.noted(data):
            return data
        broken = streams.broken(data)
        assert broken is not None
        if broken.before:
            self._hold(broken.before)
        return broken.before + await self.end("failed", broken.err)

    def noted(self, data: bytes) -> bool:
        """`passing` where nothing has to be waited for, which is nearly always; False, and nothing done,
        where something has. What comes behind the end is not noted."""
        if self.has_ended():
            return True
        if self.held_bytes > HELD_BYTES:
            return False
        if not streams.ends(data):
            self._hold(data)
            return True
        if (final := streams.final_response(data)) is None:
            return False
        self._hold(data)
        self._ended(final)
        return True

    def whole(self, body: bytes) -> None:
        """An answer that is no stream."""
        self.response = body
        self._keep(body, None)

    async def end(self, status: str, err: ApiError | None = None) -> bytes:
        """End a stream that did not end by itself: the event that says so. status: failed or cancelled; the
        first counts where it is interrupted and told again. b"" where it had ended after all."""
        if self.has_ended():
            return b""
        if self._ends_as is None:
            self._ends_as = (status, err)
        await asyncio.shield(self._read())
        if self.has_ended():
            return b""
        status, err = self._ends_as
        folding = self._folding
        begun = folding.response if folding.response is not None else self.begun()
        response = {**begun, "status": status, "output": self._output()}
        if err is not None:
            response["error"] = response_object.failure(err)
        first = response_events.event("response.created", 0, response=begun) if folding.number < 0 else b""
        number = max(0, folding.number) + 1
        last = first + response_events.event(response_events.terminal_kind(status), number, response=response)
        self._hold(last)
        self._ended(msgspec.json.encode(response))
        return last

    def events(self) -> tuple[bytes, ...] | None:
        """The stream so far, None where it is not held, or too long to be stored."""
        if self.dropped or not self.pieces or self.held_bytes > MAX_EVENT_BYTES:
            return None
        return tuple(self.pieces)

    def _hold(self, data: bytes) -> None:
        self.pieces.append(data)
        self.held_bytes += len(data)

    def _ended(self, response: bytes) -> None:
        self.response = response
        self._keep(response, self.events())

    async def _let_go(self) -> None:
        """Of the older half alone: whoever listens now is near the end."""
        await asyncio.shield(self._read())
        count = 0
        while self.held_bytes > HELD_BYTES // 2:
            self.held_bytes -= len(self.pieces[count])
            count += 1
        del self.pieces[:count]
        self.dropped += count

    async def _read(self) -> None:
        """Whatever was not read yet. Shielded by its callers: a client that leaves in the middle of it must
        not leave half of a reading behind."""
        async with self._reading:
            pieces = self.pieces[self._read_pieces - self.dropped :]
            self._read_pieces += len(pieces)
            try:
                await asyncio.to_thread(lambda: self._folding.feed(b"".join(pieces)))
            except Exception:
                logger.exception("a response's stream can't be read; what follows is left out of its object")

    def _output(self) -> Any:
        try:
            return self._folding.output()
        except Exception:
            logger.exception("a response's stream makes no output")
            return []
