"""Streaming to a client: keep-alives, whole events, and readers that leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import pytest
from aiohttp import web

from mlxpool.shared.api.anthropic import Shown
from mlxpool.shared.control import Launch
from mlxpool.worker import server
from mlxpool.worker.mailbox import Mailbox
from mlxpool.worker.request_log import RequestLog
from mlxpool.worker.text.events import Finish, Prefilled, Reasoning, Text, Usage
from mlxpool.worker.wire.chat import ChatAnswer
from mlxpool.worker.wire.endpoints import ENDPOINTS
from mlxpool.worker.wire.messages import PING, MessageAnswer
from mlxpool.worker.wire.writer import Identity, Writer
from tests.tools.served import until


async def chunks_of(
    tmp_path: Path,
    mailbox: Mailbox,
    written: list[bytes],
    make: Callable[[Identity], Writer] = ChatAnswer,
) -> None:
    """Read one streamed answer from a real UNIX socket to its end: its chunks are added to `written`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = make(Identity("chatcmpl-1", 1, "m"))
        return await server._streamed(request, answer, mailbox, RequestLog("r", "m", None), {})

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    path = str(tmp_path / "s")
    await web.SockSite(runner, server._private_socket(path)).start()
    try:
        connector = aiohttp.UnixConnector(path)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://worker/") as response,
        ):
            async for data, _ in response.content.iter_chunks():
                written.append(data)
    finally:
        await runner.cleanup()


async def test_silence_is_filled_with_keep_alives_after_the_role_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.02)
    mailbox = Mailbox()
    written: list[bytes] = []

    async def answer_late() -> None:
        await until(lambda: b"".join(written).count(b"\n\n") >= 4)
        mailbox.slot(0)([Text("Hi"), Usage(1, 1), Finish("stop")])

    await asyncio.gather(answer_late(), chunks_of(tmp_path, mailbox, written))
    bodies = [json.loads(event[6:]) for event in b"".join(written).split(b"\n\n")[:-2]]
    deltas = [body["choices"][0]["delta"] for body in bodies]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:-2].count({}) == len(deltas) - 3 >= 3
    assert deltas[-2:] == [{"content": "Hi"}, {}]
    assert {(body["id"], body["created"], body["model"]) for body in bodies} == {("chatcmpl-1", 1, "m")}


async def test_a_row_that_says_what_its_client_does_not_see_is_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_alive_s = 0.05
    monkeypatch.setattr(server, "KEEP_ALIVE_S", keep_alive_s)
    mailbox = Mailbox()
    written: list[bytes] = []
    put = mailbox.slot(0)
    put([Prefilled(1, 0), Reasoning("hm")])

    async def think() -> None:
        async with asyncio.timeout(60):
            while b"".join(written).count(PING) < 5:
                await asyncio.sleep(0.01)
                put([Reasoning("hm")])
        put([Text("Hi"), Usage(1, 1), Finish("stop")])

    def make(identity: Identity) -> Writer:
        return MessageAnswer(identity, Shown(thinking=False))

    began_s = time.monotonic()
    await asyncio.gather(think(), chunks_of(tmp_path, mailbox, written, make))
    # Once in a while, not for each that is not shown.
    assert 5 <= b"".join(written).count(PING) <= (time.monotonic() - began_s) / keep_alive_s


async def test_everything_that_came_together_is_one_write_of_whole_events(tmp_path: Path) -> None:
    mailbox = Mailbox()
    mailbox.slot(0)([Text("a"), Text("b"), Usage(1, 2), Finish("stop")])
    written: list[bytes] = []
    await chunks_of(tmp_path, mailbox, written)
    assert len(written) == 2
    assert written[1].count(b"\n\n") == 3
    assert written[1].endswith(b"data: [DONE]\n\n")


async def test_a_mailbox_gives_everything_once_and_nothing_after_its_time_out() -> None:
    mailbox = Mailbox()
    mailbox.slot(0)([Text("a")])
    mailbox.slot(1)([Text("b")])
    assert await mailbox.take() == [(0, Text("a")), (1, Text("b"))]
    assert await mailbox.take(0.001) == []


async def test_the_log_says_so_when_the_worker_itself_failed(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        async def prepare(self, *_: object) -> None:
            raise LookupError("a fault of ours")

    class Request:
        headers: ClassVar[dict[str, str]] = {}

        async def read(self) -> bytes:
            return b""

    launch = Launch("m", "folder", "socket", 64, 1, 0, 0)
    serving: Any = server.Server(launch, *(None,) * 4, Broken(), None, None)  # type: ignore[arg-type]
    with pytest.raises(LookupError):
        await serving._answer(ENDPOINTS[0], Request())
    assert ": internal_error, " in capsys.readouterr().err


def test_a_warning_is_one_header_line_whatever_was_quoted_in_it() -> None:
    assert server._warning([]) == {}
    given = server._warning(['grammar not enforced: "é"\r\nx: y', "b" * 5000])["Warning"]
    assert given.startswith('299 - "grammar not enforced: \\"?\\"  x: y; bbb')
    assert given.isascii()
    assert given.isprintable()
    assert len(given) < 1100


def test_any_number_of_warnings_takes_no_time_to_speak_of() -> None:
    began_s = time.thread_time()
    header = server._warning(["b" * 10_000_000] * 100_000)["Warning"]
    assert time.thread_time() - began_s < 0.5
    assert len(header) < 1100


async def test_a_client_that_leaves_while_it_is_written_to_leaves_no_traceback(
    caplog: pytest.LogCaptureFixture, unused_tcp_port: int
) -> None:
    over = asyncio.Event()

    async def write_on(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"x" * 65_536)
        finally:
            over.set()

    app = web.Application(middlewares=[server._answer_errors])
    app.router.add_get("/", write_on)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(60):
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await over.wait()
    finally:
        await runner.cleanup()
    assert caplog.records == []
