"""The relay: a client's request to the worker of its model, and the answer back, byte for byte.

It reads three fields of the body, takes a ticket, forwards the raw bytes and streams what comes back. The
ticket is held until the body's end, an error, or the moment the client leaves (the server cancels the handler
then, which closes the connection to the worker, which cancels the row). Nothing of a stream is parsed: only
whole events are passed on, so that a worker's death never leaves half of one, and the protocol's own error
event follows. A streaming client never waits in silence: until the worker answers the parent speaks for it,
and where it has opened the stream the worker's own opening is left out. A pool that gives a request up
(`Grant.revoked`) interrupts it wherever it waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from urllib.parse import quote

from aiohttp import web

from mlxpool.parent.library import Library
from mlxpool.parent.pool.effects import Grant
from mlxpool.parent.pool.service import PoolService
from mlxpool.parent.pool.upstream import Reply, Unreachable, UpstreamError
from mlxpool.shared.control import (
    HEADER_ASKED_MODEL,
    HEADER_CREATED,
    HEADER_REQUEST_ID,
    HEADER_RESPONSE_ID,
)
from mlxpool.shared.errors import ApiError, error, stream_event

from . import preamble
from .head import Head, read_head
from .metrics import RelayMetrics
from .preamble import ChatPreamble
from .reply import REQUEST_ID, error_response
from .trace import RequestTimes, Trace
from .vigil import Vigil
from .whole_events import WholeEvents

# A worker that dies closes its sockets a moment before its exit is known: wait for the better reason.
DEATH_NEWS_S = 2.0
# A client that takes no byte for this long holds a ticket, and so a model, for nothing.
WRITE_TIMEOUT_S = 120.0
# Telling a client that can't be written to that its stream failed must not hold anything up either.
LAST_WORDS_TIMEOUT_S = 5.0
# Larger bodies are read for their fields off the event loop's turn.
LARGE_BODY_BYTES = 2**20

_PASSED_ON = ("content-type", "retry-after", "warning", "cache-control")


class _Revoked(Exception):
    """The pool gave this request up."""

    def __init__(self, err: ApiError) -> None:
        super().__init__(err.message)
        self.err = err


class _Revocable:
    """Interrupts the task inside when the grant is revoked, and turns that into `_Revoked`.

    A cancel that comes from elsewhere (the client left) stays a cancel.
    """

    def __init__(self, grant: Grant) -> None:
        self._grant = grant
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._fired = False

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        if self._grant.revoked is not None:
            raise _Revoked(self._grant.revoked)
        self._grant.on_revoke = self._fire

    def _fire(self) -> None:
        self._fired = True
        assert self._task is not None
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._grant.on_revoke = None
        if not self._fired:
            return
        assert self._task is not None
        assert self._grant.revoked is not None
        mine = self._task.uncancel() <= self._cancelling
        if mine and (kind is None or issubclass(kind, asyncio.CancelledError)):
            raise _Revoked(self._grant.revoked) from exc


class Relay:
    """Handlers of the inference routes."""

    def __init__(self, pool: PoolService, library: Library, metrics: RelayMetrics, trace: Trace) -> None:
        self._pool = pool
        self._library = library
        self._metrics = metrics
        self._trace = trace

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        begun = time.monotonic()
        body = await request.read()
        if len(body) > LARGE_BODY_BYTES:
            head = await asyncio.to_thread(read_head, body)
        else:
            head = read_head(body)
        model = self._library.resolve(head.model)
        parsed = time.monotonic()
        grant = self._pool.request(model, head.keep_alive_s)
        exchange = _Exchange(request, body, head, grant, head.model or model.name)
        exchange.on_first_token = partial(self._pool.first_token, grant)
        exchange.on_unreachable = partial(self._pool.unreachable, grant)
        try:
            return await exchange.run()
        finally:
            self._pool.done(grant)
            times = exchange.times
            times.begun, times.parsed, times.ended = begun, parsed, time.monotonic()
            self._metrics.observe(model.name, times.outcome, *times.durations())
            self._trace.write(request[REQUEST_ID], model.name, times)


class _Exchange:
    """One request on its way to a worker and back."""

    def __init__(self, request: web.Request, body: bytes, head: Head, grant: Grant, asked: str) -> None:
        self._request = request
        self._body = body
        self._head = head
        self._grant = grant
        self._asked = asked
        self._out: web.StreamResponse | None = None
        self._preamble = ChatPreamble(asked) if head.stream else None
        self.on_first_token: Callable[[], None] | None = None
        self.on_unreachable: Callable[[str], None] | None = None
        self.times = RequestTimes()

    async def run(self) -> web.StreamResponse:
        """The finished response; an error is one too."""
        try:
            answer = await self._answer()
            self.times.outcome = "ok" if answer.status < 400 else "error"
            return answer
        except _Revoked as revoked:
            return await self._fail(revoked.err)
        except ApiError as err:
            return await self._fail(err)
        except UpstreamError as err:
            if isinstance(err, Unreachable) and self.on_unreachable is not None:
                self.on_unreachable(str(err))
            return await self._fail(await self._cause_of_death(err))

    async def _answer(self) -> web.StreamResponse:
        if self._preamble is None:
            return await self._forward(None)
        async with Vigil(self._speak, preamble.OPEN_AFTER_S, preamble.KEEP_ALIVE_S) as vigil:
            return await self._forward(vigil)

    async def _speak(self) -> None:
        """Say in the worker's place that the answer will come."""
        if self._out is not None:
            await self._send(self._opened.keep_alive())
            return
        await self._start_stream({"content-type": "text/event-stream; charset=utf-8"})
        await self._send(self._opened.opening())

    @property
    def _opened(self) -> ChatPreamble:
        assert self._preamble is not None
        return self._preamble

    async def _forward(self, vigil: Vigil | None) -> web.StreamResponse:
        worker = await self._grant.granted
        self.times.granted = time.monotonic()
        headers = {
            "Content-Type": "application/json",
            HEADER_REQUEST_ID: self._request[REQUEST_ID],
            HEADER_ASKED_MODEL: quote(self._asked),
        }
        if self._preamble is not None:
            headers[HEADER_RESPONSE_ID] = self._preamble.response_id
            headers[HEADER_CREATED] = str(self._preamble.created)
        async with (
            _Revocable(self._grant),
            await worker.upstream.request("POST", self._request.path, headers, self._body) as answer,
        ):
            if vigil is not None:
                await vigil.end()
            passed = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
            if not passed.get("content-type", "").startswith("text/event-stream"):
                # Whole answers are small, and complete or not sent: a death in the middle is a 502.
                body = await answer.read()
                self.times.first_byte = time.monotonic()
                return await self._whole(answer.status, body, passed)
            await self._stream(answer, passed)
        assert self._out is not None
        return self._out

    async def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        if self._out is None:
            return web.Response(status=status, body=body, headers=headers)
        # The stream was opened before the worker refused the request: the refusal is its last event.
        await self._send(b"data: " + body + b"\n\n" + self._opened.terminal)
        await self._out.write_eof()
        return self._out

    async def _stream(self, answer: Reply, headers: dict[str, str]) -> None:
        if self._out is None:
            await self._start_stream(headers)
            events = WholeEvents()
        else:
            # The worker's opening was said already; its client hears in its place that the worker is there.
            events = WholeEvents(self._opened.keep_alive())
        assert self._out is not None
        ended = False
        pieces = 0
        try:
            while chunk := await answer.piece():
                pieces += 1
                if pieces == 1:
                    self.times.first_byte = time.monotonic()
                if pieces == 2 and self.on_first_token is not None:
                    self.on_first_token()  # the first piece is the stream's opening
                if not (data := events.feed(chunk)):
                    continue
                ended = data.endswith(b"data: [DONE]\n\n")
                await self._send(data)
        except UpstreamError:
            if not ended:
                raise
        await self._out.write_eof()

    async def _start_stream(self, headers: dict[str, str]) -> None:
        out = web.StreamResponse(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        await out.prepare(self._request)
        self._out = out

    async def _send(self, data: bytes) -> None:
        assert self._out is not None
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._out.write(data)
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError("the client reads nothing") from None

    async def _cause_of_death(self, err: Exception) -> ApiError:
        """Why the worker's connection broke: the pool's reason if it comes soon, else what is known."""
        told = asyncio.Event()
        self._grant.on_revoke = told.set
        if self._grant.revoked is None:
            try:
                async with asyncio.timeout(DEATH_NEWS_S):
                    await told.wait()
            except TimeoutError:
                pass
        self._grant.on_revoke = None
        if self._grant.revoked is not None:
            return self._grant.revoked
        name = self._grant.ticket.model
        return error(
            "worker_crashed", f"the connection to the worker of model {name!r} broke ({type(err).__name__})"
        )

    async def _fail(self, err: ApiError) -> web.StreamResponse:
        """An HTTP error while nothing was sent, an error event afterwards."""
        self.times.outcome = "error"
        if self._out is None:
            return error_response(self._request, err)
        try:
            async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                await self._out.write(stream_event(err, "openai"))
                await self._out.write_eof()
        except (TimeoutError, ConnectionError):
            if self._request.transport is not None:
                self._request.transport.close()
        return self._out
