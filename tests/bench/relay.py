"""What the relay costs: first byte, events per second, and the parent's own answers under load.

All against one scripted worker at a time, once through the parent's port and once on the worker's own
socket, in turn. The worker is real Python writing real events, the client counts in its own process; both
share the machine's cores with the parent, so the direct figure is what is left of the machine without it.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench import common, streams
from tests.tools.scripted_script import make_scripted_model

FIRST_BYTE_P50_LIMIT_MS = 0.5
FIRST_BYTE_P99_LIMIT_MS = 2.0
EVENTS_PER_S_LIMIT = 100_000
CONTROL_P99_LIMIT_MS = 5.0

# Pairs before the first that counts: connections, code paths and branch caches are warm by then.
WARM_UP_PAIRS = 50
STREAMS = 16
# Events that the scripted worker puts into one write → tokens of each stream, for a second or two of work.
# One is the worst case, every event its own chunk and wake-up; sixteen is an engine that outruns its socket.
FLOODS = {1: 10_000, 16: 60_000}
PACED_MODELS, PACED_STREAMS, PACED_EVENTS_PER_S = 4, 4, 200
# Between two questions to the parent under load: a probe that never pauses would be load itself.
PROBE_PAUSE_S = 0.002


class Asker:
    """One kept connection and the time its answers take."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._client = streams.connect(target)
        self._client.settimeout(common.START_TIMEOUT_S)
        if self._client.family != socket.AF_UNIX:
            self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def first_byte_s(self, request: bytes) -> float:
        """Seconds from the request's last byte to the first event; reads the answer to its end."""
        start = time.perf_counter()
        self._client.sendall(request)
        answer = b""
        while b"data: " not in answer:
            answer += self._read()
        took = time.perf_counter() - start
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            answer += self._read()
        if b"data: [DONE]\n\n" not in answer:
            raise RuntimeError(f"a stream without [DONE]: {answer[-300:]!r}")
        return took

    def get_s(self, path: str) -> float:
        """Seconds of a whole GET."""
        start = time.perf_counter()
        self._client.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._target}\r\n\r\n".encode())
        answer = self._read()
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._read()
        head = answer[:end].decode("latin-1").lower()
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(f"{path}: {answer[:300]!r}")
        length = int(head.partition("content-length:")[2].split("\r\n", 1)[0])
        while len(answer) < end + 4 + length:
            answer += self._read()
        return time.perf_counter() - start

    def _read(self) -> bytes:
        data = self._client.recv(streams.READ_BYTES)
        if not data:
            raise RuntimeError(f"{self._target} closed the connection")
        return data


def first_byte(report: common.Report, server: common.Server, pairs: int) -> None:
    """Interleaved pairs over kept connections, the order turned every time."""
    direct_socket = load(server, "first")
    ways = {"relayed": str(server.port), "direct": direct_socket}
    askers = {way: Asker(target) for way, target in ways.items()}
    requests = {way: streams.chat_request(target, "first", "hi") for way, target in ways.items()}
    rows = {way: report.row(f"first byte {way}", "ms") for way in ways}
    for n in range(WARM_UP_PAIRS + pairs):
        for way in sorted(ways, reverse=bool(n % 2)):
            took = askers[way].first_byte_s(requests[way])
            if n >= WARM_UP_PAIRS:
                rows[way].samples.append(took * 1000)
    relayed, direct = rows["relayed"].samples, rows["direct"].samples
    for percent, limit in ((50, FIRST_BYTE_P50_LIMIT_MS), (99, FIRST_BYTE_P99_LIMIT_MS)):
        added = common.percentile(relayed, percent) - common.percentile(direct, percent)
        report.figures[f"first byte added p{percent} ms"] = added
        report.targets.append(common.Target(f"first byte added p{percent}", added, limit, "ms"))


def throughput(report: common.Report, server: common.Server, rounds: int) -> None:
    """Events of 16 streams over the wall time of all of them, for each width of a worker's writes."""
    for width, tokens in FLOODS.items():
        model = f"flood{width}"
        label = f"{STREAMS} streams, {width} events a write"
        ways = {"relayed": str(server.port), "direct": load(server, model)}
        rows = {way: report.row(f"SSE events {way}, {label}", "1/s") for way in ways}
        client = report.row(f"processor time of the counting client over wall time, relayed, {label}", "1")
        # Role, tokens, finish, [DONE].
        expected = tokens + 3
        for n in range(rounds):
            for way in sorted(ways, reverse=bool(n % 2)):
                counted = finish(start_client([f"{ways[way]},{model},{STREAMS}"]))
                if counted.broken or set(counted.events) != {expected}:
                    rows[way].failed.append(f"{counted.broken}, events {counted.events}, expected {expected}")
                    continue
                rows[way].samples.append(sum(counted.events) / counted.seconds)
                if way == "relayed":
                    client.samples.append(counted.cpu_s / counted.seconds)
        relayed, direct = (rows[way].settle().median for way in ("relayed", "direct"))
        if relayed and direct:
            report.figures[f"events relayed over direct, {label}"] = relayed / direct
        name = f"SSE events relayed, {label}"
        report.targets.append(common.Target(name, relayed, EVENTS_PER_S_LIMIT, "1/s", at_most=False))


def control_under_load(report: common.Report, server: common.Server, seconds: float) -> None:
    """The parent's own answers, idle and while paced streams are relayed."""
    models = [f"paced{n}" for n in range(PACED_MODELS)]
    for model in models:
        load(server, model)
    for state in ("idle", "loaded"):
        rows = {path: report.row(f"{path} {state}", "ms") for path in ("/health", "/api/pool")}
        client = None
        if state == "loaded":
            client = start_client([f"{server.port},{model},{PACED_STREAMS}" for model in models])
            assert client.stdout is not None
            if client.stdout.readline() != b"started\n":
                rows["/health"].failed.append("the paced streams did not start")
        asker = Asker(str(server.port))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for path, row in rows.items():
                row.samples.append(asker.get_s(path) * 1000)
                time.sleep(PROBE_PAUSE_S)
        if client is not None:
            note_pace(report, rows["/health"], finish(client))
            for path, row in rows.items():
                worst = common.percentile(row.samples, 99)
                report.targets.append(
                    common.Target(f"{path} p99 under load", worst, CONTROL_P99_LIMIT_MS, "ms")
                )


def note_pace(report: common.Report, row: common.Row, counted: streams.Counted) -> None:
    """Whether the load was the load that was promised."""
    pace = min(counted.events) / counted.seconds
    report.figures["events/s of the slowest paced stream"] = pace
    if counted.broken or pace < 0.9 * PACED_EVENTS_PER_S:
        row.failed.append(f"the paced streams fell behind: {pace:.0f} events/s; {counted.broken}")


def load(server: common.Server, model: str) -> str:
    """Has the model loaded by asking it, and tells its worker's socket."""
    server.json(
        "/v1/chat/completions",
        {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    )
    return common.worker_socket(server, model)


def start_client(plan: list[str]) -> subprocess.Popen[bytes]:
    """The counting client in its own process."""
    argv = [sys.executable, "-m", "tests.bench.streams", *plan]
    return subprocess.Popen(argv, cwd=common.REPO, stdout=subprocess.PIPE)


def finish(client: subprocess.Popen[bytes]) -> streams.Counted:
    """What the client counted."""
    said, _ = client.communicate()
    return msgspec.json.decode(said.splitlines()[-1], type=streams.Counted)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of probing, idle and under load each")
    args = parser.parse_args()
    report = common.report(
        "relay",
        **vars(args),
        streams=STREAMS,
        floods={f"{width} events a write": f"{tokens} tokens a stream" for width, tokens in FLOODS.items()},
        paced=f"{PACED_MODELS} workers x {PACED_STREAMS} streams x {PACED_EVENTS_PER_S} events/s",
        probe_pause_s=PROBE_PAUSE_S,
    )
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as scratch:
        home, models = Path(scratch, "home"), Path(scratch, "models")
        home.mkdir()
        models.mkdir()
        # The load outlasts the probing: its streams start before and end after.
        paced_tokens = int(PACED_EVENTS_PER_S * (args.seconds + 2))
        make_scripted_model(models, "first", tokens=4)
        for width, tokens in FLOODS.items():
            make_scripted_model(models, f"flood{width}", tokens=tokens, events_per_write=width, text="word ")
        for n in range(PACED_MODELS):
            make_scripted_model(models, f"paced{n}", tokens=paced_tokens, tokens_per_s=PACED_EVENTS_PER_S)
        config = Path(scratch, "config.toml")
        config.write_text("".join(f"[models.flood{width}]\nbatch = {STREAMS}\n" for width in FLOODS))
        port = common.free_port()
        argv = common.scripted_pool(home, models, port, config=str(config))
        with common.serving(argv, port, Path(scratch, "log")) as server:
            first_byte(report, server, args.pairs)
            throughput(report, server, args.rounds)
            control_under_load(report, server, args.seconds)
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
