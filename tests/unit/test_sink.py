"""A client's connection as an answer's sink: one that reads nothing holds nothing up for long."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from mlxpool.parent.edge import sink as module
from mlxpool.parent.edge.sink import WebSink

# More than the server takes without waiting for the client.
EVENT = b"data: " + b"x" * 2**17 + b"\n\n"


async def to_a_deaf_client(answer: Callable[[WebSink], Awaitable[None]]) -> BaseException | None:
    """What `answer` raises where its client takes the head and then no byte."""
    outcome: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def handler(request: web.Request) -> web.StreamResponse:
        sink = WebSink(request)
        await sink.start({"content-type": "text/event-stream"})
        try:
            await answer(sink)
        except BaseException as err:
            outcome.set_result(err)
            raise
        outcome.set_result(None)
        return sink.response

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with socket.create_connection(runner.addresses[0][:2]) as client:
            client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(60):
                return await asyncio.shield(outcome)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("does", ["sends", "ends"])
async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.1)

    async def answer(sink: WebSink) -> None:
        # What the transport says once its buffers are full.
        sink._request.protocol.pause_writing()
        await (sink.send(EVENT) if does == "sends" else sink.end())

    err = await to_a_deaf_client(answer)
    assert isinstance(err, ConnectionResetError)
    assert str(err) == "the client reads nothing"


async def test_small_events_hold_nothing_up_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.1)

    async def answer(sink: WebSink) -> None:
        for _ in range(100_000):
            await sink.send(b"data: " + b"x" * 1000 + b"\n\n")

    err = await to_a_deaf_client(answer)
    assert isinstance(err, ConnectionResetError)
    assert str(err) == "the client reads nothing"
