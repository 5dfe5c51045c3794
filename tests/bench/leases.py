"""What sharing the GPU with jobs costs: a decision of the line, a request's part in it, and how long a job
waits for the GPU once the last row before it has ended.

The last is measured on a real model through the real pool: two streams run, a job asks, the streams end; the
time from the last byte of the later one until the job has the GPU. A stream beside which a job waits is
compared to one beside which none does, in turns: a job must cost nothing before it has the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import msgspec

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.parent.library import Library, LibraryModel
from mlxpool.parent.pool.leases import Lease, Leases
from mlxpool.parent.pool.service import PoolService
from mlxpool.shared import config
from mlxpool.shared.backend import detect, worker_environment
from tests.bench import common

HOLDERS = 1000
DECISION_LIMIT_US = 20.0
# Beyond the decode step that may be under way.
GRANT_LIMIT_MS = 100.0
STREAMS, TOKENS = 2, 24
LONE_TOKENS = 64


def line(report: common.Report, rounds: int) -> None:
    """One decision among a thousand who hold the GPU: somebody comes, somebody goes, whose turn is it?"""
    decisions = report.row(f"a decision at {HOLDERS} holders", "us")
    request = report.row(f"a request's part in the line at {HOLDERS} holders", "us")
    leases, number = Leases(), HOLDERS
    for holder in range(HOLDERS):
        leases.share(holder)
    for n in range(rounds):
        number += 1
        began = time.perf_counter()
        lease = Lease(number, "job", 0, 0.0)
        leases.ask(lease)
        leases.leave(n)
        turn, gate, reserved = leases.turn, leases.gate, leases.reserved
        leases.end(lease)
        decisions.samples.append((time.perf_counter() - began) * 1e6 / 4)
        assert (turn, gate, reserved) == (None, number, 0)
        number += 1
        began = time.perf_counter()
        leases.share(number)
        came = leases.gate, leases.turn, leases.reserved
        leases.leave(number)
        went = leases.gate, leases.turn, leases.reserved
        request.samples.append((time.perf_counter() - began) * 1e6)
        assert came == went
        leases.share(number)
    dearest = decisions.settle().p99
    report.targets.append(common.Target("a decision, p99", dearest, DECISION_LIMIT_US, "us"))


class Pool:
    """The pool in this process, with one real model."""

    def __init__(self, pool: PoolService, model: LibraryModel) -> None:
        self.pool, self.model = pool, model
        self.gaps_s: list[float] = []

    async def stream(self, tokens: int, begun: asyncio.Event | None = None) -> float:
        """One streamed answer of so many tokens under a ticket; when its last byte came, monotonic."""
        body = {
            "messages": [{"role": "user", "content": "Tell a long story."}],
            "max_tokens": tokens, "stream": True, "temperature": 0.0,
        }  # fmt: skip
        grant = self.pool.request(self.model)
        try:
            worker = await grant.granted
            data = msgspec.json.encode(body)
            headers = {"Content-Type": "application/json"}
            async with await worker.upstream.request("POST", "/v1/chat/completions", headers, data) as answer:
                if answer.status != 200:
                    raise RuntimeError((await answer.read()).decode())
                said, last = b"", 0.0
                while piece := await answer.piece():
                    now = time.monotonic()
                    if begun is not None and b'"content"' in piece:
                        begun.set()
                    if last:
                        self.gaps_s.append(now - last)
                    said, last = piece, now
                if b"[DONE]" not in said:
                    raise RuntimeError(f"a stream without its end: {said!r}")
                return last
        finally:
            self.pool.done(grant)

    async def granted_after_s(self) -> float:
        """Seconds from the end of the later of two streams until a job that waits has the GPU."""
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(self.stream(TOKENS, event)) for event in begun]
        for event in begun:
            await event.wait()
        async with self.pool.exclusive("bench", 0):
            entered = time.monotonic()
        return entered - max([await stream for stream in streams])

    async def lone_s(self, waits: bool) -> float:
        """Seconds of a lone stream from its first token on; waits: beside a job that waits for it."""
        begun = asyncio.Event()
        stream = asyncio.create_task(self.stream(LONE_TOKENS, begun))
        await begun.wait()
        began = time.monotonic()
        job = asyncio.create_task(self._wait()) if waits else None
        took = await stream - began
        if job is not None:
            await job
        return took

    async def _wait(self) -> None:
        async with self.pool.exclusive("bench", 0):
            pass


async def grants(report: common.Report, starter: Path, rounds: int) -> None:
    """How soon a job has the GPU, and what it costs until then."""
    granted = report.row("the GPU is granted after the last row's end", "ms")
    lone = {
        waits: report.row(f"a stream, {'a' if waits else 'no'} job waits", "ms") for waits in (False, True)
    }
    with tempfile.TemporaryDirectory(prefix="mlxb") as folder:
        flags = {"home": folder, "models": [str(starter.parent)], "pool.spare_worker": False}
        settings = config.load(None, flags=flags)
        backend = detect()
        library = Library(settings)
        service = PoolService(
            settings, library, backend,
            argv=[sys.executable, "-m", "mlxpool.worker"],
            env=worker_environment(backend, os.environ), run_folder=Path(folder, "run"),
        )  # fmt: skip
        pool = Pool(service, library.resolve(starter.name))
        service.start()
        try:
            await pool.stream(4)
            pool.gaps_s.clear()
            for _ in range(rounds):
                granted.samples.append(await pool.granted_after_s() * 1000)
            step_ms = common.percentile(pool.gaps_s, 50) * 1000
            for n in range(rounds):
                for waits in sorted(lone, reverse=bool(n % 2)):
                    lone[waits].samples.append(await pool.lone_s(waits) * 1000)
        finally:
            await service.close()
    report.figures["decode step of two rows, median ms"] = step_ms
    worst = granted.settle().high
    limit = step_ms + GRANT_LIMIT_MS
    report.targets.append(common.Target("granted after the last row's end, worst", worst, limit, "ms"))
    without, beside = (lone[waits].settle().median for waits in (False, True))
    if without and beside:
        report.figures["a stream beside a waiting job over one without, medians"] = beside / without


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starter", type=Path, required=True, help="its folder")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    report = common.report("leases", rounds=args.rounds, holders=HOLDERS)
    line(report, HOLDERS)
    asyncio.run(grants(report, args.starter.resolve(), args.rounds))
    return report.emit()


if __name__ == "__main__":
    sys.exit(main())
