"""As much HTTP/1.1 as a worker's socket needs, without the 150 ms that importing a web framework takes.

One `Exchange` is one connection. It reads a request, hands it to the handler as a task, and reads the next
when the handler has ended its answer. It owns its buffers and the task: when the client leaves, the task is
cancelled at once, whatever it waits for. Request bodies come with Content-Length (the relay knows the length
of what it forwards); a chunked one is refused, not guessed at.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

# A head is a request line and a dozen headers; what passes this is no client of ours.
MAX_HEAD_BYTES = 64 * 1024
# The limit that the parent enforces before a body reaches a worker.
MAX_BODY_BYTES = 64 * 1024 * 1024


class Request(NamedTuple):
    """One request; header names are lower-case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class BadHead(Exception):
    """A head this server doesn't take: status and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


Handler = Callable[[Request, "Exchange"], Awaitable[None]]


class Exchange(asyncio.Protocol):
    """One connection and the answer that is being written on it."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.head_sent = False

    # What the handler uses

    def whole(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """The whole answer, JSON, in one write."""
        self._write(self._head(status, {"Content-Length": str(len(body)), **(headers or {})}) + body)

    def start_stream(self, headers: dict[str, str], first: bytes = b"") -> None:
        """The head of a streamed answer: 200, server-sent events; its first piece shares the write."""
        stream = {"Transfer-Encoding": "chunked", "Cache-Control": "no-cache", **headers}
        head = self._head(200, stream, "text/event-stream")
        self._write(head + _chunk(first) if first else head)

    def send(self, data: bytes) -> None:
        """A piece of a streamed answer, one HTTP chunk and one write."""
        self._write(_chunk(data))

    def end_stream(self) -> None:
        """The end of a streamed answer."""
        self._write(b"0\r\n\r\n")

    @property
    def blocked(self) -> bool:
        """True while the client reads more slowly than the handler writes."""
        return not self._writable.is_set()

    async def writable(self) -> None:
        """Waits for a slow client."""
        await self._writable.wait()

    async def flushed(self) -> None:
        """Waits until the kernel has all that was written, for a handler that is about to die."""
        # asyncio tells of the low-water mark only, not of an empty buffer.
        while self._transport is not None and self._transport.get_write_buffer_size():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None:
            self._next()

    def eof_received(self) -> bool:
        # No client of a worker half-closes: an end of input is a client that left.
        self._abandon()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        self._writable.set()
        self._abandon()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # Inside

    def _abandon(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _head(self, status: int, headers: dict[str, str], kind: str = "application/json") -> bytes:
        self.head_sent = True
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _next(self) -> None:
        try:
            request = self._parse()
        except BadHead as err:
            self.whole(err.status, b'{"error":{"message":"%b"}}' % str(err).encode(), {"Connection": "close"})
            if self._transport is not None:
                self._transport.close()
            return
        if request is not None:
            self.head_sent = False
            self._task = asyncio.get_running_loop().create_task(self._serve(request))

    def _parse(self) -> Request | None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadHead(431, "the request's head is too long")
            return None
        request_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        try:
            method, target, _version = request_line.split(" ")
            length = int(headers.get("content-length", "0"))
        except ValueError:
            raise BadHead(400, "malformed request head") from None
        if "transfer-encoding" in headers:
            raise BadHead(411, "send Content-Length: chunked request bodies are not taken")
        if not 0 <= length <= MAX_BODY_BYTES:
            raise BadHead(413, "the request's body is too long")
        if len(self._buffer) < end + 4 + length:
            return None
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        url = urlsplit(target)
        return Request(method, url.path, dict(parse_qsl(url.query)), headers, body)

    async def _serve(self, request: Request) -> None:
        try:
            await self._handler(request, self)
        except Exception:
            traceback.print_exc()
            if not self.head_sent:
                self.whole(500, b'{"error":{"message":"the scripted worker failed","code":"internal_error"}}')
            elif self._transport is not None:
                self._transport.abort()
        self._task = None
        if self._transport is None:
            return
        if request.headers.get("connection", "").lower() == "close":
            self._transport.close()
        else:
            self._next()
