"""One request's way to a worker and back: any protocol, any sink.

The ticket was taken by whoever makes an exchange, and is held until `run` returns or is cancelled (which
closes the connection to the worker, which cancels the row). Nothing of a stream is parsed: only whole events
are passed on, so that a worker's death never leaves half of one, and the protocol's own error event follows.
So it does where the worker's stream is over before the protocol's end of it was said.
A streaming client never waits in silence: until the worker answers the parent speaks for it, and where it has
opened the stream the worker's own opening is left out. A pool that gives a request up (`Grant.revoked`)
interrupts it wherever it waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from urllib.parse import quote

import msgspec

from mlxpool.parent.pool.effects import Grant
from mlxpool.parent.pool.upstream import Reply, Unreachable, UpstreamError
from mlxpool.shared.control import (
    HEADER_ASKED_MODEL,
    HEADER_CREATED,
    HEADER_REQUEST_ID,
    HEADER_RESPONSE_ID,
)
from mlxpool.shared.errors import ApiError, encode, error, protocol_of

from . import preamble as voices
from .preamble import Preamble
from .sink import EVENT_STREAM, Sink
from .trace import RequestTimes
from .vigil import Vigil
from .whole_events import WholeEvents

logger = logging.getLogger("mlxpool.edge")

# A worker that dies closes its sockets a moment before its exit is known: wait for the better reason.
DEATH_NEWS_S = 2.0
# Telling a client that can't be written to that its stream failed must not hold anything up either.
LAST_WORDS_TIMEOUT_S = 5.0

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


class Exchange:
    """One request under way.

    body, path: what the worker gets. stream: whether its answer is to be one; `preamble` speaks for the
    parent then, and is None otherwise. asked: the model's name as the client wrote it. headers: further ones
    for the worker. times: see RequestTimes; its outcome is `ok` or `error` after `run`, else the client left.
    """

    def __init__(
        self,
        body: bytes,
        path: str,
        stream: bool,
        grant: Grant,
        asked: str,
        request_id: str,
        sink: Sink,
        preamble: Preamble | None,
        headers: Mapping[str, str] = {},
    ) -> None:
        assert stream == (preamble is not None)
        self._body = body
        self._path = path
        self._grant = grant
        self._request_id = request_id
        self._sink = sink
        self._preamble = preamble
        self._headers = {
            "Content-Type": "application/json",
            HEADER_REQUEST_ID: request_id,
            HEADER_ASKED_MODEL: quote(asked),
            **headers,
        }
        self._ended = False  # the protocol's end was said: not even an error may follow
        self.on_first_token: Callable[[], None] | None = None
        self.on_unreachable: Callable[[str], None] | None = None
        self.times = RequestTimes()

    async def run(self) -> None:
        """Returns when the sink has the whole answer, which may be an error. Raises ConnectionError when the
        client is gone."""
        try:
            await self._answer()
        except _Revoked as revoked:
            await self._fail(revoked.err)
        except ApiError as err:
            await self._fail(err)
        except UpstreamError as err:
            if isinstance(err, Unreachable) and self.on_unreachable is not None:
                self.on_unreachable(str(err))
            await self._fail(await self._cause_of_death(err))

    async def _answer(self) -> None:
        if self._preamble is None:
            await self._forward(None)
            return
        async with Vigil(self._speak, voices.OPEN_AFTER_S, voices.KEEP_ALIVE_S) as vigil:
            await self._forward(vigil)

    async def _speak(self) -> None:
        """Say in the worker's place that the answer will come."""
        assert self._preamble is not None
        if self._sink.started:
            await self._sink.send(self._preamble.keep_alive())
            return
        await self._sink.start(EVENT_STREAM)
        await self._sink.send(self._preamble.opening())

    async def _forward(self, vigil: Vigil | None) -> None:
        worker = await self._grant.granted
        self.times.granted = time.monotonic()
        if self._preamble is not None:
            self._headers[HEADER_RESPONSE_ID] = self._preamble.response_id
            self._headers[HEADER_CREATED] = str(self._preamble.created)
        async with (
            _Revocable(self._grant),
            await worker.upstream.request("POST", self._path, self._headers, self._body) as answer,
        ):
            if vigil is not None:
                await vigil.end()
            passed = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
            if self._preamble is not None and passed.get("content-type", "").startswith("text/event-stream"):
                await self._stream(answer, passed, self._preamble)
                self.times.outcome = "ok"
                return
            # Whole answers are small, and complete or not sent: a death in the middle is a 502.
            body = await answer.read()
            self.times.first_byte = time.monotonic()
            if self._sink.started:
                # The stream was opened before the worker refused the request: the refusal is its last event.
                raise refusal(answer.status, body, answer.headers)
            await self._sink.whole(answer.status, body, passed)
            self.times.outcome = "ok" if answer.status < 400 else "error"

    async def _stream(self, answer: Reply, headers: dict[str, str], preamble: Preamble) -> None:
        change: Callable[[bytes], bytes] | None = None
        if not self._sink.started:
            await self._sink.start(headers)
            events = WholeEvents()
        else:
            # What the worker opens with was said already; in its place is said that the worker is there.
            await self._sink.send(preamble.keep_alive())
            events = WholeEvents(preamble.replaced)
            change = preamble.passed
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
                if change is not None:
                    data = change(data)
                self._ended = preamble.is_end(data)
                await self._sink.send(data)
        except UpstreamError:
            if not self._ended:
                raise
        if not self._ended:
            name = self._grant.ticket.model
            logger.error("request %s: the stream of model %r has no end", self._request_id, name)
            raise error(
                "internal_error", f"the worker of model {name!r} stopped before the answer was complete"
            )
        await self._sink.end()

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

    async def _fail(self, err: ApiError) -> None:
        """An HTTP error while nothing was sent, an error event afterwards."""
        self.times.outcome = "error"
        if not self._sink.started:
            body = encode(err, protocol_of(self._path), self._request_id)
            await self._sink.whole(err.status, body, {"content-type": "application/json", **err.headers()})
            return
        assert self._preamble is not None
        # Made outside the client's time: it may be the reading of all that was said.
        last_words = b"" if self._ended else await self._preamble.failure(err)
        try:
            async with asyncio.timeout(LAST_WORDS_TIMEOUT_S):
                if last_words:
                    await self._sink.send(last_words)
                await self._sink.end()
        except (TimeoutError, ConnectionError):
            self._sink.abandon()


class _Blame(msgspec.Struct):
    message: str = ""
    code: str | None = None
    param: str | None = None


class _Envelope(msgspec.Struct):
    error: _Blame


def refusal(status: int, body: bytes, headers: Mapping[str, str] = {}) -> ApiError:
    """The error that a worker's answer tells of, in whatever envelope; nonsense of its is our failure.

    headers: the answer's, whatever their case; `Retry-After` of them is the error's too.
    """
    try:
        blame = msgspec.json.decode(body, type=_Envelope).error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return error("internal_error", f"the worker answered a stream's request with status {status}")
    waits = next((value for name, value in headers.items() if name.lower() == "retry-after"), "")
    return ApiError(
        status,
        blame.code or "internal_error",
        blame.message,
        param=blame.param,
        retry_after_s=float(waits) if waits.isdecimal() else None,
    )
