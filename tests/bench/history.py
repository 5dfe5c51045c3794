"""What keeping responses costs: milliseconds that a Responses call adds to chat, and the rate of its relay.

Calls go to a parent over a scripted worker, with ten thousand responses in its file, and to the worker's own
socket, in turn; the worker's protocols differ in cost, so each is taken off its own. The relay is measured
without the worker's writers, which are slower than it: an exchange reads events that were written beforehand
off a socket and writes them to a client's, with a recorder between and without.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import uvloop
from aiohttp import web

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.parent.database import FILE_NAME, Database
from mlxpool.parent.edge.exchange import Exchange
from mlxpool.parent.edge.responses_sinks import RecordedPreamble, Tee
from mlxpool.parent.edge.sink import WebSink
from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.history.records import of_response
from mlxpool.parent.history.store import HistoryStore
from mlxpool.parent.history.table import MIGRATIONS
from mlxpool.parent.pool.effects import Grant
from mlxpool.parent.pool.upstream import Upstream
from mlxpool.shared.api.response_events import event
from mlxpool.shared.api.response_object import new_response
from mlxpool.shared.config import History
from tests.bench import common, streams
from tests.bench.relay import load
from tests.tools.scripted_script import make_scripted_model

ROWS = 10_000
ADDED_P50_LIMIT_MS = 1.0
RATE_LIMIT = 0.6
WARM_UP = 20
# About a page of text each way.
TEXT = "lorem ipsum " * 150
EVENTS = 20_000
# As one event a write, and as an engine that outruns its socket.
WIDTHS = (1, 16)


async def fill(path: Path) -> str:
    """A file with ROWS responses; the id of one of them."""
    database = Database(path, MIGRATIONS)
    store = HistoryStore(database, History)
    await store.open(lambda left: left)
    given = msgspec.json.encode([{"type": "message", "role": "user", "content": TEXT}])
    name = ""
    for n in range(ROWS):
        name = f"resp_{n:048x}"
        response = new_response({}, id=name, created=int(time.time()), model="a", status="completed")
        content = [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}]
        message = {"type": "message", "role": "assistant", "status": "completed", "content": content}
        response["output"] = [{"id": f"msg_{n}", **message}]
        record = of_response(
            msgspec.json.encode(response), time.time(), given, background=False, previous=None, events=None
        )
        store.keep(record)
        store.write(record)
        if n % 500 == 0:
            await store.close()
    await store.close()
    await database.close()
    return name


class Asker:
    """One kept connection."""

    def __init__(self, target: str) -> None:
        self._client = streams.connect(target)
        self._client.settimeout(common.START_TIMEOUT_S)
        if self._client.family != socket.AF_UNIX:
            self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = f"127.0.0.1:{target}" if target.isdigit() else "worker"

    def ask_ms(self, path: str, fields: dict[str, Any]) -> float:
        """Milliseconds of a whole answer."""
        body = msgspec.json.encode(fields)
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        start = time.perf_counter()
        self._client.sendall(request)
        answer = self._client.recv(streams.READ_BYTES)
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._client.recv(streams.READ_BYTES)
        length = int(answer[:end].lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        while len(answer) < end + 4 + length:
            answer += self._client.recv(streams.READ_BYTES)
        if b" 200 " not in answer[:16]:
            raise RuntimeError(f"{path}: {answer[:500]!r}")
        return (time.perf_counter() - start) * 1000


def added(report: common.Report, server: common.Server, earlier: str, pairs: int) -> None:
    """Median milliseconds that a call adds to chat, alone and going on from a stored one."""
    direct, relayed = Asker(load(server, "a")), Asker(str(server.port))
    turns = [
        {"type": "message", "role": "user", "content": TEXT},
        {"type": "message", "role": "assistant", "content": TEXT},
        {"type": "message", "role": "user", "content": "hi"},
    ]
    chat = {"model": "a", "messages": [{"role": turn["role"], "content": turn["content"]} for turn in turns]}
    calls: dict[str, tuple[Asker, str, dict[str, Any]]] = {
        "chat direct": (direct, "/v1/chat/completions", chat),
        "chat relayed": (relayed, "/v1/chat/completions", chat),
        "responses direct": (direct, "/v1/responses", {"model": "a", "input": turns}),
        "responses relayed": (relayed, "/v1/responses", {"model": "a", "input": turns}),
        "follow-up relayed": (
            relayed,
            "/v1/responses",
            {"model": "a", "input": "hi", "previous_response_id": earlier},
        ),
    }
    rows = {name: report.row(name, "ms") for name in calls}
    for n in range(WARM_UP + pairs):
        for name in sorted(calls, reverse=bool(n % 2)):
            asker, path, fields = calls[name]
            took = asker.ask_ms(path, fields)
            if n >= WARM_UP:
                rows[name].samples.append(took)
    medians = {name: row.settle().median or 0.0 for name, row in rows.items()}
    relay_ms = medians["chat relayed"] - medians["chat direct"]
    for name in ("responses", "follow-up"):
        value = medians[f"{name} relayed"] - medians["responses direct"] - relay_ms
        report.targets.append(
            common.Target(f"{name}: added to chat, p50, {ROWS} stored", value, ADDED_P50_LIMIT_MS, "ms")
        )


def stream_bytes() -> list[bytes]:
    """The events of a long answer."""
    response = new_response({}, id="resp_x", created=0, model="a")
    at = {"item_id": "msg_x", "output_index": 0, "content_index": 0}
    begin = [
        event("response.created", 0, response=response),
        event("response.in_progress", 1, response=response),
    ]
    deltas = [
        event("response.output_text.delta", n, **at, delta="word ", logprobs=[]) for n in range(2, EVENTS)
    ]
    return [
        *begin,
        *deltas,
        event("response.completed", EVENTS, response={**response, "status": "completed"}),
    ]


def flood(path: str, width: int) -> None:
    """Answers every connection's every request with the stream, as fast as it is taken."""
    told = stream_bytes()
    pieces = [b"".join(told[n : n + width]) for n in range(0, len(told), width)]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = [head, *(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces), b"0\r\n\r\n"]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        client, _ = listener.accept()
        with client:
            while client.recv(65536):
                for piece in answer:
                    client.sendall(piece)


def relay(path: str, port: int) -> None:
    """Serves `/plain` and `/recorded`: an exchange each, with the worker at `path`, to whoever asks."""

    async def answer(request: web.Request) -> web.StreamResponse:
        granted = asyncio.get_running_loop().create_future()
        granted.set_result(SimpleNamespace(upstream=upstream))
        grant = Grant(SimpleNamespace(model="a"), granted)  # type: ignore[arg-type]  # no pool is behind it
        sink = WebSink(request)
        kept: list[int] = []
        recorder = Recorder(lambda _, events: kept.extend(map(len, events or ())))
        preamble = RecordedPreamble("a", {}, None, recorder, 0)
        recorded = request.path == "/recorded"
        target = Tee(sink, recorder, 0) if recorded else sink
        await Exchange(b"{}", "/v1/responses", True, grant, "a", "req", target, preamble).run()
        if recorded and sum(kept) < EVENTS:
            raise RuntimeError("the recorder did not keep what was sent")
        return sink.response

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/plain", answer), web.get("/recorded", answer)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.get_running_loop().create_future()

    upstream = Upstream(path)
    uvloop.run(serve())


def stream_s(port: int, path: str) -> float:
    """Seconds from the question to the stream's end."""
    with streams.connect(str(port)) as client:
        start = time.perf_counter()
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        last = b""
        while not last.endswith(b"0\r\n\r\n"):
            piece = client.recv(streams.READ_BYTES)
            if not piece:
                raise RuntimeError("the stream broke off")
            last = (last + piece)[-16:] if len(piece) < 16 else piece[-16:]
        return time.perf_counter() - start


def wait_for(path: str, port: int) -> None:
    """Until both listen."""
    end = time.monotonic() + common.START_TIMEOUT_S
    while time.monotonic() < end:
        try:
            streams.connect(str(port)).close()
        except OSError:
            time.sleep(0.02)
            continue
        if os.path.exists(path):
            return
    raise RuntimeError("the relay did not start")


def rate(report: common.Report, folder: Path, rounds: int) -> None:
    """Events a second with a recorder over those without, for each width of a worker's writes."""
    for width in WIDTHS:
        path, port = str(folder / f"flood{width}"), common.free_port()
        processes = [
            multiprocessing.Process(target=flood, args=(path, width), daemon=True),
            multiprocessing.Process(target=relay, args=(path, port), daemon=True),
        ]
        for process in processes:
            process.start()
        wait_for(path, port)
        rows = {
            way: report.row(f"events/s {'recorded' if way else 'plain'}, {width} a write", "1/s")
            for way in (True, False)
        }
        try:
            for n in range(rounds + 1):
                for way in sorted(rows, reverse=bool(n % 2)):
                    took = stream_s(port, "/recorded" if way else "/plain")
                    if n:
                        rows[way].samples.append(EVENTS / took)
        finally:
            for process in processes:
                process.terminate()
                process.join()
        recorded, plain = (rows[way].settle().median or 0.0 for way in (True, False))
        report.targets.append(
            common.Target(
                f"rate of a recorded stream over a plain one, {width} events a write",
                recorded / plain,
                RATE_LIMIT,
                "1",
                at_most=False,
            )
        )


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    report = common.report("history", **vars(args), rows=ROWS, events=EVENTS)
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as scratch:
        home, models = Path(scratch, "home"), Path(scratch, "models")
        home.mkdir()
        models.mkdir()
        make_scripted_model(models, "a", tokens=4)
        earlier = asyncio.run(fill(home / FILE_NAME))
        port = common.free_port()
        with common.serving(common.scripted_pool(home, models, port), port, Path(scratch, "log")) as server:
            added(report, server, earlier, args.pairs)
        rate(report, Path(scratch), args.rounds)
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
