"""What watching costs: the parent's processor time with ten viewers of /api/events, and without.

Four paced scripted workers are relayed all the while, so that there is something to tell. Windows with and
without viewers alternate; the viewers read what they are sent and throw it away, in a process of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.bench import common, relay
from tests.tools.scripted_script import make_scripted_model

VIEWERS = 10
LIMIT_OF_ONE_CORE = 0.02
# The first moments of a window hold the opening of connections and each viewer's first states.
SETTLE_S = 0.5


def watch(port: int, count: int) -> None:
    """Be that many viewers until standard input closes."""
    request = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
    clients = []
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(request)
        clients.append(client)
        threading.Thread(target=drop, args=(client,), daemon=True).start()
    sys.stdin.read()


def drop(client: socket.socket) -> None:
    """Read and forget."""
    with contextlib.suppress(OSError):
        while client.recv(1 << 16):
            pass


def window_s(process: psutil.Process, seconds: float) -> float:
    """Processor seconds the process used per second."""
    time.sleep(SETTLE_S)
    before, begun = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, took = process.cpu_times(), time.monotonic() - begun
    return (after.user + after.system - before.user - before.system) / took


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each window")
    parser.add_argument("--watch", type=int, help=argparse.SUPPRESS)  # the viewers' own process
    args = parser.parse_args()
    if args.watch is not None:
        watch(args.watch, VIEWERS)
        return 0
    report = common.report("viewers", rounds=args.rounds, seconds=args.seconds, viewers=VIEWERS)
    total_s = args.rounds * 2 * (args.seconds + SETTLE_S + 1)
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as scratch:
        home, models = Path(scratch, "home"), Path(scratch, "models")
        home.mkdir()
        models.mkdir()
        names = [f"paced{n}" for n in range(relay.PACED_MODELS)]
        for name in names:
            tokens = int(relay.PACED_EVENTS_PER_S * total_s)
            make_scripted_model(models, name, tokens=tokens, tokens_per_s=relay.PACED_EVENTS_PER_S)
        port = common.free_port()
        with common.serving(common.scripted_pool(home, models, port), port, Path(scratch, "log")) as server:
            for name in names:
                relay.load(server, name)
            client = relay.start_client([f"{port},{name},{relay.PACED_STREAMS}" for name in names])
            assert client.stdout is not None
            client.stdout.readline()
            measure(report, server, args.rounds, args.seconds)
            client.kill()
            client.wait()
    return report.emit()


def measure(report: common.Report, server: common.Server, rounds: int, seconds: float) -> None:
    """Windows in turn, and what the difference is."""
    process = psutil.Process(server.process.pid)
    without, with_viewers = report.row("parent, no viewer", "1"), report.row("parent, ten viewers", "1")
    for _ in range(rounds):
        without.samples.append(window_s(process, seconds))
        argv = [sys.executable, __file__, "--watch", str(server.port)]
        viewers = subprocess.Popen(argv, stdin=subprocess.PIPE)
        time.sleep(1.0)
        with_viewers.samples.append(window_s(process, seconds))
        assert viewers.stdin is not None
        viewers.stdin.close()
        viewers.wait()
    added = [b - a for a, b in zip(without.samples, with_viewers.samples, strict=True)]
    row = report.row("added by ten viewers, of one core", "1")
    row.samples = added
    report.targets = [common.Target(row.name, row.settle().median, LIMIT_OF_ONE_CORE, "1")]


if __name__ == "__main__":
    sys.exit(main())
