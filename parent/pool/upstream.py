"""HTTP/1.1 to a worker's UNIX socket: the relay's other half.

A general client spends more on one request than the relay may add to it, so this one does what a worker
needs and nothing else: POST and GET with a body of bytes, answers by Content-Length or chunked, connections
kept and used again. A connection whose answer was not read to its end is closed, which is how a worker learns
that the client left. What breaks the protocol raises `UpstreamError`, as a lost connection does.

Owned by the event loop; one request at a time per connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

# Unread answer bytes after which the worker is made to wait for the client.
HIGH_WATER_BYTES = 256 * 1024
# A worker's head is a few hundred bytes; a chunk's size line a few.
MAX_HEAD_BYTES = 64 * 1024
MAX_SIZE_LINE_BYTES = 1024


class UpstreamError(ConnectionError):
    """The worker's end is gone, or speaks no HTTP."""


class Unreachable(UpstreamError):
    """There is nobody to connect to."""


class Reply:
    """One answer: its head, and its body piece by piece. Close it when done, whole or not."""

    def __init__(self, status: int, headers: dict[str, str], connection: _Connection) -> None:
        self.status = status
        self.headers = headers  # lower-case names
        self._connection = connection

    async def piece(self) -> bytes:
        """The next bytes of the body, all that have come; b"" at its end. Raises UpstreamError."""
        return await self._connection.piece()

    async def read(self) -> bytes:
        """The rest of the body. Raises UpstreamError."""
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        """Give the connection back, or cut it where the body was not read to its end."""
        self._connection.release()

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Upstream:
    """The connections to one socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: deque[_Connection] = deque()
        self._all: set[_Connection] = set()

    async def request(
        self, method: str, target: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        """Send one request and wait for the head of its answer.

        Raises UpstreamError; Unreachable, one of them, where no connection can be made.

        target: path and query, already encoded. headers: ASCII, without control characters.
        """
        connection = await self._connection()
        lines = [f"{method} {target} HTTP/1.1", "Host: worker", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        try:
            status, found = await connection.ask("\r\n".join(lines).encode("ascii") + b"\r\n\r\n", body)
        except BaseException:
            connection.release()
            raise
        return Reply(status, found, connection)

    def close(self) -> None:
        """Cut every connection."""
        for connection in list(self._all):
            connection.abort()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        try:
            _, made = await asyncio.get_running_loop().create_unix_connection(
                lambda: _Connection(self), self._path
            )
        except OSError as err:
            raise Unreachable(f"can't connect: {err.strerror or err}") from err
        return made

    def opened(self, connection: _Connection) -> None:
        """A connection tells that it is there."""
        self._all.add(connection)

    def free(self, connection: _Connection) -> None:
        """A connection may serve the next request."""
        self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """A connection is gone."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One connection: writes a request, parses its answer as it comes."""

    def __init__(self, owner: Upstream) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None
        self._buffer = b""
        self._busy = False
        self._paused = False
        self._reset()

    def _reset(self) -> None:
        self._head: tuple[int, dict[str, str]] | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._left = 0  # bytes of the current chunk, or of the whole body, still to come
        self._chunked = False
        self._between = False  # the line end after a chunk's data comes next
        self._ended = False
        self._keep = True

    # ---- the transport's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are none by class, only by methods
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._error is None:
            self._error = UpstreamError(f"the connection is gone{f': {exc}' if exc else ''}")
        self._owner.lost(self)
        self._wake()

    def data_received(self, data: bytes) -> None:
        if not self._busy or self._ended:
            self._break("bytes that nobody asked for")
            return
        self._buffer = self._buffer + data if self._buffer else data
        try:
            if self._head is None and not self._read_head():
                return
            self._read_body()
        except ValueError as err:
            self._break(str(err))
            return
        if self._size > HIGH_WATER_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise ValueError("an endless head")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        self._buffer = self._buffer[end + 4 :]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"no HTTP answer: {first[:80]!r}")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        status = int(rest[:3])
        self._keep = headers.get("connection", "").lower() != "close"
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked:
            self._left = int(headers.get("content-length", "0"))
            self._ended = self._left == 0
        self._head = (status, headers)
        return True

    def _read_body(self) -> None:
        data, at = self._buffer, 0
        pieces = self._pieces
        before = len(pieces)
        while at < len(data) and not self._ended:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._between = self._chunked and not self._left
                self._ended = not self._chunked and not self._left
                continue
            start = at + 2 if self._between else at
            end = data.find(b"\r\n", start)
            if end < 0:
                if len(data) - at > MAX_SIZE_LINE_BYTES:
                    raise ValueError("an endless chunk size")
                break
            size = int(data[start:end].partition(b";")[0], 16)
            if size:
                self._left, self._between, at = size, False, end + 2
            elif data.startswith(b"\r\n", end + 2):
                self._ended, at = True, end + 4
            elif len(data) < end + 4:
                break
            else:
                raise ValueError("trailers after the last chunk")
        self._buffer = data[at:]
        self._size += sum(map(len, pieces[before:]))
        if self._ended and self._buffer:
            raise ValueError("bytes after the end of the answer")

    def _break(self, why: str) -> None:
        self._error = UpstreamError(f"the worker answers nonsense: {why}")
        self.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the request's side ----

    @property
    def usable(self) -> bool:
        """True while the other end is there."""
        return self._error is None and self._transport is not None and not self._transport.is_closing()

    async def ask(self, head: bytes, body: bytes) -> tuple[int, dict[str, str]]:
        """Send a request; the status and headers of its answer."""
        assert self._transport is not None
        self._reset()
        self._busy = True
        self._transport.write(head + body if len(body) < HIGH_WATER_BYTES else head)
        if len(body) >= HIGH_WATER_BYTES:
            self._transport.write(body)
        while self._head is None:
            await self._wait()
        return self._head

    async def piece(self) -> bytes:
        """See `Reply.piece`."""
        while not self._pieces:
            if self._ended:
                return b""
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._size = 0
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def release(self) -> None:
        """The request is over: keep the connection if its answer was read whole."""
        if not self._busy:
            return
        self._busy = False
        if self._ended and self._keep and not self._pieces and self.usable and not self._paused:
            self._owner.free(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close at once; the worker sees it and cancels the row."""
        if self._transport is not None:
            self._transport.abort()
