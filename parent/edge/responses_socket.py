"""`/v1/responses` as a WebSocket: each `response.create` is answered by its events, one text frame each.

A connection has one response at a time. What it said last can be gone on from there even where it was not to
be stored: that record is the connection's alone. A client that leaves, or closes, cancels what runs.

Owns its connections; of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from mlxpool.parent.history import streams
from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.history.records import Record
from mlxpool.shared.api import response_events, responses
from mlxpool.shared.api.read import boolean, invalid, quoted
from mlxpool.shared.errors import ApiError, envelope, error

from .exchange import refusal
from .head import read_head
from .relay import LARGE_BODY_BYTES, head_of
from .reply import REQUEST_ID
from .responses_answers import Answers, Prepared, read_ask
from .responses_sinks import RecordedPreamble
from .sink import WRITE_TIMEOUT_S

logger = logging.getLogger("mlxpool.edge")

# A connection whose other end is gone without a word is noticed by this.
HEARTBEAT_S = 30.0
# How long a client may take to answer a close.
CLOSE_TIMEOUT_S = 2.0

_messages = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CREATE = "response.create"


class SocketSink:
    """One response on a connection: its events, or the error it ended with, as text frames."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self.started = False

    async def start(self, headers: Mapping[str, str]) -> None:
        del headers  # frames have none
        self.started = True

    async def send(self, data: bytes) -> None:
        for text in streams.events_of(data):
            await send(self._socket, text.decode())

    async def end(self) -> None:
        """The last event said it."""

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        del headers
        await tell(self._socket, refusal(status, body))

    def abandon(self) -> None:
        """The connection's own end follows."""


async def send(socket: web.WebSocketResponse, text: str) -> None:
    """One frame. Raises ConnectionError when the client is gone, or reads nothing."""
    if socket.closed:
        raise ConnectionResetError("the connection is closed")
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await socket.send_str(text)
    except TimeoutError:
        raise ConnectionResetError("the client reads nothing") from None


async def tell(socket: web.WebSocketResponse, err: ApiError) -> None:
    """An error as a frame."""
    told = {"type": "error", "status": err.status, "error": envelope(err, "responses")["error"]}
    await send(socket, msgspec.json.encode(told).decode())


class ResponsesSocket:
    """The handler and its connections."""

    def __init__(self, answers: Answers, max_message_bytes: int) -> None:
        self._answers = answers
        self._max_message_bytes = max_message_bytes
        self._open: set[web.WebSocketResponse] = set()

    async def connect(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses, upgraded"""
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S,
            max_msg_size=self._max_message_bytes,
            timeout=CLOSE_TIMEOUT_S,
            compress=False,
        )
        if not socket.can_prepare(request).ok:
            raise error(
                "invalid_request",
                "GET /v1/responses is a WebSocket: send Connection: Upgrade and Upgrade: websocket, or POST",
            )
        await socket.prepare(request)
        self._open.add(socket)
        connection = _Connection(self._answers, socket, request[REQUEST_ID])
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await connection.hear(message.data.encode())
                elif message.type is WSMsgType.BINARY:
                    await tell(socket, invalid("type", "messages are text frames of JSON"))
        except ConnectionError:
            pass  # it is gone, and so is what it asked for
        finally:
            self._open.discard(socket)
            await connection.leave()
        return socket

    async def close(self) -> None:
        """The server stops: tell every client so."""
        await asyncio.gather(
            *(socket.close(code=WSCloseCode.GOING_AWAY, message=b"server shutdown") for socket in self._open),
            return_exceptions=True,
        )


class _Connection:
    """What one client has asked for, and what it can go on from."""

    def __init__(self, answers: Answers, socket: web.WebSocketResponse, request_id: str) -> None:
        self._answers = answers
        self._socket = socket
        self._request_id = request_id
        self._count = 0
        self._last: Record | None = None
        self._task: asyncio.Task[None] | None = None

    async def hear(self, text: bytes) -> None:
        """One message. Raises ConnectionError when the client is gone."""
        if self._task is not None and not self._task.done():
            await tell(
                self._socket,
                error("invalid_request", "a response is under way on this connection; wait for its end"),
            )
            return
        self._task = asyncio.get_running_loop().create_task(self._answer(text))

    async def leave(self) -> None:
        """The client is gone."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _answer(self, text: bytes) -> None:
        try:
            try:
                await self._create(text)
            except ApiError as err:
                await tell(self._socket, err)
            except ConnectionError:
                raise
            except Exception:
                logger.exception("request %s.%s on a WebSocket", self._request_id, self._count)
                await tell(self._socket, error("internal_error", "the server failed; its log says how"))
        except ConnectionError:
            await self._socket.close()

    async def _create(self, text: bytes) -> None:
        begun = time.monotonic()
        self._count += 1
        request_id = f"{self._request_id}.{self._count}"
        body, generate = await _body_of(text)
        ask, head = await read_ask(body), await head_of(body)
        if ask.background:
            raise invalid("background", "background is not for a WebSocket; POST it to /v1/responses")
        prepared = await self._answers.prepare(ask, head, self._last, {"stream": True})
        if not generate:
            await self._warm(prepared)
            return
        await self._answers.answer(prepared, request_id, SocketSink(self._socket), begun, self._remember)

    def _remember(self, record: Record) -> None:
        self._last = record

    async def _warm(self, prepared: Prepared) -> None:
        """A response that says nothing, to go on from: what `generate: false` asks for."""
        await asyncio.to_thread(responses.parse, prepared.resolved.body)
        model = self._answers.library.resolve(prepared.head.model)
        recorder = Recorder(lambda *_: None)
        preamble = RecordedPreamble(
            prepared.head.model or model.name, prepared.resolved.fields, prepared.previous, recorder, 0
        )
        opening = preamble.opening() + preamble.keep_alive()
        response = preamble.begun("completed") | {"completed_at": int(time.time())}
        last = response_events.event("response.completed", 2, response=response)
        record = self._answers.keep(prepared, msgspec.json.encode(response), (opening + last,))
        self._last = record
        try:
            await SocketSink(self._socket).send(opening + last)
        finally:
            self._answers.write(prepared, record)


async def _body_of(text: bytes) -> tuple[bytes, bool]:
    """The body that a message holds, and whether anything is to be generated. Raises ApiError 400."""
    if len(text) > LARGE_BODY_BYTES:
        return await asyncio.to_thread(_read_message, text)
    return _read_message(text)


def _read_message(text: bytes) -> tuple[bytes, bool]:
    read_head(text)  # says what is wrong with what is no JSON object
    raws = _messages.decode(text)
    kind = msgspec.json.decode(raws.pop("type", msgspec.Raw(b"null")))
    if kind != _CREATE:
        raise invalid("type", f"type is {quoted(kind)}; a client's message is {_CREATE}")
    generate = boolean("generate", msgspec.json.decode(raws.pop("generate", msgspec.Raw(b"null"))), True)
    return msgspec.json.encode(raws), generate
