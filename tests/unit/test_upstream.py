"""The relay's client of a worker's socket, against a real socket whose other end says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.parent.pool.upstream import HIGH_WATER_BYTES, Upstream, UpstreamError, _Connection
from tests.tools.served import until

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Name: v\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;x=1\r\n world\r\n0\r\n\r\n"


class Peer:
    """The other end of the socket: answers each request with the next of the given answers."""

    def __init__(self, path: Path, answers: Sequence[bytes]) -> None:
        self.path = path
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Event()
        self.asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self.answers:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                self.asked.set()
                writer.write(self.answers.pop(0))
                await writer.drain()
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.closed.set()
            writer.close()


@contextlib.asynccontextmanager
async def peer(tmp_path: Path, *answers: bytes) -> AsyncIterator[tuple[Peer, Upstream]]:
    there = Peer(tmp_path / "s", answers)
    server = await asyncio.start_unix_server(there.serve, str(there.path), limit=2**26)
    upstream = Upstream(str(there.path))
    try:
        yield there, upstream
    finally:
        upstream.close()
        server.close()


async def test_a_whole_answer_is_read_and_the_connection_used_again(tmp_path: Path):
    async with peer(tmp_path, WHOLE, CHUNKED, WHOLE) as (there, upstream):
        for body in (b"hello", b"hello world", b"hello"):
            async with await upstream.request("POST", "/x?y=1", {"A": "b"}, b"body") as reply:
                assert (reply.status, await reply.read()) == (200, body)
        assert there.connections == 1
        assert there.requests[0].startswith(
            b"POST /x?y=1 HTTP/1.1\r\nHost: worker\r\nContent-Length: 4\r\nA: b\r\n"
        )
        assert there.requests[0].endswith(b"\r\n\r\nbody")


async def test_headers_are_found_by_their_lower_case_names(tmp_path: Path):
    async with peer(tmp_path, WHOLE) as (_, upstream), await upstream.request("GET", "/") as reply:
        assert reply.headers["x-name"] == "v"


async def test_an_answer_that_is_not_read_to_its_end_closes_the_connection(tmp_path: Path):
    endless = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"
    async with peer(tmp_path, endless, b"") as (there, upstream):
        async with await upstream.request("GET", "/") as reply:
            assert await reply.piece() == b"hello"
        await asyncio.wait_for(there.closed.wait(), 60)


async def test_a_cancelled_request_closes_the_connection(tmp_path: Path):
    async with peer(tmp_path, b"", b"") as (there, upstream):
        task = asyncio.create_task(upstream.request("GET", "/"))
        await asyncio.wait_for(there.asked.wait(), 60)
        task.cancel()
        await asyncio.wait_for(there.closed.wait(), 60)


async def test_a_connection_that_the_worker_closed_while_idle_is_not_used_again(tmp_path: Path):
    async with peer(tmp_path, WHOLE) as (there, upstream):
        async with await upstream.request("GET", "/") as reply:
            await reply.read()
        upstream._idle[0].abort()
        there.answers.append(WHOLE)
        await asyncio.sleep(0)
        async with await upstream.request("GET", "/") as reply:
            assert await reply.read() == b"hello"
        assert there.connections == 2


async def test_no_socket_is_an_upstream_error(tmp_path: Path):
    with pytest.raises(UpstreamError, match="can't connect"):
        await Upstream(str(tmp_path / "none")).request("GET", "/")


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n\r\n",
        b"x" * 70_000,
    ],
)
async def test_nonsense_is_an_upstream_error_and_no_hang(tmp_path: Path, answer: bytes):
    async with peer(tmp_path, answer) as (_, upstream):
        with pytest.raises(UpstreamError, match="nonsense"):
            async with asyncio.timeout(60), await upstream.request("GET", "/") as reply:
                await reply.read()


async def test_bytes_after_an_answer_cost_the_connection_and_not_the_answer(tmp_path: Path):
    async with peer(tmp_path, WHOLE + b"more", WHOLE) as (there, upstream):
        for _ in range(2):
            async with await upstream.request("GET", "/") as reply:
                assert await reply.read() == b"hello"
        assert there.connections == 2


async def test_a_connection_lost_in_the_middle_is_an_upstream_error(tmp_path: Path):
    async with peer(tmp_path, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel") as (there, upstream):
        async with await upstream.request("GET", "/") as reply:
            assert await reply.piece() == b"hel"
            for connection in list(upstream._all):
                connection.abort()
            with pytest.raises(UpstreamError):
                await reply.piece()
        assert there.connections == 1


async def test_a_worker_that_outruns_its_client_is_made_to_wait(tmp_path: Path):
    size = 16 * HIGH_WATER_BYTES
    big = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size
    async with peer(tmp_path, big) as (_, upstream), await upstream.request("GET", "/") as reply:
        held = next(iter(upstream._all))
        await until(lambda: held._paused)
        await asyncio.sleep(0.01)
        assert held._size < 4 * HIGH_WATER_BYTES
        assert len(await reply.read()) == size


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, len(CHUNKED)), max_size=12), st.sampled_from([WHOLE, CHUNKED]))
def test_every_way_to_cut_an_answer_gives_the_same_body(cuts: list[int], answer: bytes):
    connection = _Connection(Upstream("nowhere"))
    connection.connection_made(Wire())
    connection._busy = True
    at = 0
    for cut in sorted({*(min(cut, len(answer)) for cut in cuts), len(answer)}):
        connection.data_received(answer[at:cut])
        at = cut
    assert connection._error is None
    assert connection._ended
    assert b"".join(connection._pieces) == (b"hello" if answer is WHOLE else b"hello world")
