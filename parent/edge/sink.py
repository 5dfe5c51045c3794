"""Where an answer goes: a client's connection, or whatever else hears one.

An exchange with a worker knows nothing of HTTP's client side. It starts a stream or hands over a whole
answer, and what takes it may be a socket, a recorder in front of one, or a buffer that outlives its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Protocol

from aiohttp import web

# A client that takes no byte for this long holds a ticket, and so a model, for nothing.
WRITE_TIMEOUT_S = 120.0

# A connection that holds so little lets a writer go on at once: half of what event loops resume one at. A
# time-out costs a third of what passing an event on does.
NEVER_PAUSED_BYTES = 8 * 1024

# The headers of a stream that the parent begins by itself.
EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}


class Sink(Protocol):
    """Takes one answer: either `start`, any number of `send`, `end`; or one `whole`."""

    @property
    def started(self) -> bool:
        """Whether a stream was begun: from then on nothing but its events can be said."""

    async def start(self, headers: Mapping[str, str]) -> None:
        """A stream begins. headers: the worker's that clients are to see; names in lower case."""

    async def send(self, data: bytes) -> None:
        """Whole server-sent events. Raises ConnectionError when the client is gone."""

    async def end(self) -> None:
        """The stream is complete. Raises like `send`."""

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """An answer that is no stream. headers: with its content-type."""

    def abandon(self) -> None:
        """Nothing more can be said, not even that: what is open is cut."""


class WebSink:
    """A client's request. `response` is what its handler returns once the answer is given."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._stream: web.StreamResponse | None = None
        self._whole: web.Response | None = None

    @property
    def started(self) -> bool:
        return self._stream is not None

    @property
    def response(self) -> web.StreamResponse:
        """The answer that was given."""
        given = self._stream if self._stream is not None else self._whole
        assert given is not None
        return given

    async def start(self, headers: Mapping[str, str]) -> None:
        out = web.StreamResponse(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        await out.prepare(self._request)
        self._stream = out

    async def send(self, data: bytes) -> None:
        assert self._stream is not None
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() + len(data) <= NEVER_PAUSED_BYTES:
            await self._stream.write(data)
            return
        await self._in_time(self._stream.write(data))

    async def end(self) -> None:
        assert self._stream is not None
        await self._in_time(self._stream.write_eof())

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._whole = web.Response(status=status, body=body, headers=headers)

    async def _in_time(self, written: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await written
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client reads nothing") from None

    def abandon(self) -> None:
        if self._request.transport is not None:
            self._request.transport.close()
