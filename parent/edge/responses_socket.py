"""`/v1/responses` as a WebSocket: each `response.create` is answered by its events, one text frame each.

A connection has one response at a time. What it said last can be gone on from there even where it was not to
be stored: that record is the connection's alone, and what is stored is found where everything is. All that
connections hold is bounded: the records that were held longest go first. A client that leaves, or closes,
cancels what runs.

Owns its connections; of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from mlxpool.parent.history import streams
from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.history.records import Record
from mlxpool.shared.api import response_events
from mlxpool.shared.api.read import boolean, invalid, quoted
from mlxpool.shared.errors import ApiError, envelope, error

from .exchange import refusal
from .head import read_head
from .relay import head_of, maybe_apart
from .reply import REQUEST_ID
from .responses_answers import Answers, Prepared, check, preamble_of, read_ask
from .sink import WRITE_TIMEOUT_S

logger = logging.getLogger("mlxpool.edge")

# A connection whose other end is gone without a word is noticed by this.
HEARTBEAT_S = 30.0
# How long a client may take to answer a close.
CLOSE_TIMEOUT_S = 2.0
# A client has one or two. Each takes some memory even while it says nothing.
CONNECTIONS_LIMIT = 256
RETRY_AFTER_S = 10.0
# Records of all connections together.
HELD_BYTES = 256 * 2**20
# Of a request's id, whose own limit is 128: the rest is its number.
_ID_CHARS = 112

_messages = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CREATE = "response.create"


class SocketSink:
    """One response on a connection: its events, or the error it ended with, as text frames. is_ending: its
    last frame was handed over, and the client may have read it."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket
        self.started = False
        self.is_ending = False

    async def start(self, headers: Mapping[str, str]) -> None:
        del headers  # frames have none
        self.started = True

    async def send(self, data: bytes) -> None:
        self.is_ending = streams.ends(data)
        for text in streams.events_of(data):
            await send(self._socket, text.decode())

    async def end(self) -> None:
        """The last event said it."""

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        await self.refuse(refusal(status, body, headers))

    async def refuse(self, err: ApiError) -> None:
        """An error in place of a response. Raises like `send`."""
        self.is_ending = True
        await tell(self._socket, err)

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
    if headers := err.headers():
        told["headers"] = {name.lower(): value for name, value in headers.items()}
    await send(socket, msgspec.json.encode(told).decode())


class Held:
    """What connections can go on from and the history does not have: of each, its last record."""

    def __init__(self) -> None:
        self._records: dict[object, Record] = {}
        self._bytes = 0

    def hold(self, connection: object, record: Record) -> None:
        """In place of what was held for it; without its events, which nobody asks for."""
        self.drop(connection)
        record = msgspec.structs.replace(record, events=None)
        self._records[connection] = record
        self._bytes += record.raw_bytes
        while self._bytes > HELD_BYTES:
            self.drop(next(iter(self._records)))

    def drop(self, connection: object) -> None:
        """It holds nothing any more."""
        record = self._records.pop(connection, None)
        if record is not None:
            self._bytes -= record.raw_bytes

    def of(self, connection: object) -> Record | None:
        """What is held for it."""
        return self._records.get(connection)


class ResponsesSocket:
    """The handler and its connections."""

    def __init__(self, answers: Answers, max_message_bytes: int) -> None:
        self._answers = answers
        self._max_message_bytes = max_message_bytes
        self._open: set[web.WebSocketResponse] = set()
        self._held = Held()

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
        if len(self._open) >= CONNECTIONS_LIMIT:
            raise error(
                "queue_full",
                f"{CONNECTIONS_LIMIT} WebSockets are open already; close one, or POST",
                retry_after_s=RETRY_AFTER_S,
            )
        self._open.add(socket)
        connection = _Connection(self._answers, self._held, socket, request[REQUEST_ID])
        try:
            await socket.prepare(request)
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
            self._held.drop(connection)
        return socket

    async def close(self) -> None:
        """The server stops: tell every client so."""
        await asyncio.gather(
            *(socket.close(code=WSCloseCode.GOING_AWAY, message=b"server shutdown") for socket in self._open),
            return_exceptions=True,
        )


class _Connection:
    """What one client has asked for, and what it can go on from."""

    def __init__(self, answers: Answers, held: Held, socket: web.WebSocketResponse, request_id: str) -> None:
        self._answers = answers
        self._held = held
        self._socket = socket
        self._request_id = request_id[:_ID_CHARS]
        self._count = 0
        self._sink = SocketSink(socket)
        self._task: asyncio.Task[None] | None = None
        self._left = False

    async def hear(self, text: bytes) -> None:
        """One message. Raises ConnectionError when the client is gone."""
        if self._task is not None and not self._task.done():
            if not self._sink.is_ending:
                await tell(
                    self._socket,
                    error("invalid_request", "a response is under way on this connection; wait for its end"),
                )
                return
            # Its client has heard the end, or will: what is left to do takes no time.
            await asyncio.wait([self._task])
        self._sink = SocketSink(self._socket)
        self._task = asyncio.get_running_loop().create_task(self._answer(text))

    async def leave(self) -> None:
        """The client is gone: an answer of its that ends later is nobody's to go on from."""
        self._left = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _answer(self, text: bytes) -> None:
        try:
            try:
                await self._create(text)
            except ApiError as err:
                await self._sink.refuse(err)
            except ConnectionError:
                raise
            except Exception:
                logger.exception("request %s.%s on a WebSocket", self._request_id, self._count)
                await self._sink.refuse(error("internal_error", "the server failed; its log says how"))
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
        prepared = await self._answers.prepare(ask, head, self._held.of(self), {"stream": True})
        if not generate:
            await self._warm(prepared)
            return
        keep = partial(self._remember, prepared)
        await self._answers.answer(prepared, request_id, self._sink, begun, keep)

    def _remember(self, prepared: Prepared, record: Record) -> None:
        if self._left:
            return
        if prepared.store:
            self._held.drop(self)  # the history has it, until it is deleted or too old
        else:
            self._held.hold(self, record)

    async def _warm(self, prepared: Prepared) -> None:
        """A response that says nothing, to go on from: what `generate: false` asks for."""
        await check(prepared.resolved)
        model = self._answers.library.resolve(prepared.head.model)
        asked = prepared.head.model or model.name
        preamble = preamble_of(prepared, asked, Recorder(lambda *_: None))
        opening = preamble.opening() + preamble.keep_alive()
        response = preamble.begun("completed") | {"completed_at": int(time.time())}
        last = response_events.event("response.completed", 2, response=response)
        record = self._answers.keep(prepared, msgspec.json.encode(response), (opening + last,))
        if record is not None:
            self._remember(prepared, record)
        try:
            await self._sink.send(opening + last)
        finally:
            self._answers.write(prepared, record)


async def _body_of(text: bytes) -> tuple[bytes, bool]:
    """The body that a message holds, and whether anything is to be generated. Raises ApiError 400."""
    told: tuple[bytes, bool] = await maybe_apart(len(text), _read_message, text)
    return told


def _read_message(text: bytes) -> tuple[bytes, bool]:
    read_head(text)  # says what is wrong with what is no JSON object
    raws = _messages.decode(text)
    kind = msgspec.json.decode(raws.pop("type", msgspec.Raw(b"null")))
    if kind != _CREATE:
        raise invalid("type", f"type is {quoted(kind)}; a client's message is {_CREATE}")
    generate = boolean("generate", msgspec.json.decode(raws.pop("generate", msgspec.Raw(b"null"))), True)
    return msgspec.json.encode(raws), generate
