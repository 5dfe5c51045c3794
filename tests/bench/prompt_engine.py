"""The prompt cache inside one engine, on random weights of a large shape: for a GPU, without the port.

Each round has a prefix of its own and takes, in turn: a question alone; the prefix and a question cold; the
prefix and another question from memory; and, once all is flushed, the engine made anew and the files out of
the page cache, the prefix and a third question from disk. Beside the restore the same files are read by a
plain sequential reader, and the same bytes written by a plain writer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.shared.control import CacheLaunch, Launch
from mlxpool.worker.cache import durability
from mlxpool.worker.cache.open import open_cache
from mlxpool.worker.engine.chunks import ChunkWidth
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.terms import Limits, Loaded
from mlxpool.worker.load import backend as mlx_backend
from mlxpool.worker.load import load
from mlxpool.worker.request.plan import Plan, Sampling
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from tests.bench import common
from tests.bench.engine import SHAPES, Stream, random_folder

REST_TOKENS = 55
# Who goes on with a prompt has read the answer to it first, or run a tool.
PAUSE_S = 0.1
HIT_LIMIT, COLD_LIMIT, TWICE_LIMIT, DISK_LIMIT, WRITE_LIMIT = 1.3, 0.1, 2.0, 0.8, 0.7
PLENTY_BYTES = 1 << 36
READ_BYTES = 8 << 20


def ids(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + place * 31 + place * place % 97) % 1900 + 10 for place in range(count)]


def made(loaded: Loaded, launch: Launch) -> Engine:
    width = ChunkWidth(mlx_backend())
    engine = Engine(
        lambda: loaded, Limits(8, 1 << 40), width, lambda of: open_cache(launch, of, mlx_backend(), engine)
    )
    engine.start()
    return engine


async def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's tokens needed no work."""
    plan = Plan(tuple(prompt), 2, True, Sampling(0.0, 1.0, 0, 0.0, 1), frozenset())
    stream = Stream()
    row = Row(plan, AnswerText(ByteDetokeniser(stream.note)), stream.put)
    began_s = time.perf_counter()
    engine.submit(row)
    await stream.ended.wait()
    return stream.at_s[0] - began_s, row.cached_tokens or 0


def records(kv: Path) -> set[Path]:
    return set(kv.rglob("*.safetensors"))


def forget(paths: list[Path]) -> None:
    os.sync()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_read_s(paths: list[Path]) -> float:
    buffer = memoryview(bytearray(READ_BYTES))
    began_s = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began_s


def plain_write_s(paths: list[Path], folder: Path) -> float:
    """What writing the same bytes takes, without putting them onto the device."""
    contents = [path.read_bytes() for path in paths]
    began_s = time.perf_counter()
    for place, content in enumerate(contents):
        (folder / str(place)).write_bytes(content)
    return time.perf_counter() - began_s


async def measure(folder: Path, kv: Path, report: common.Report, rounds: int, prefix_tokens: int) -> None:
    loaded = load(folder, lambda *_: None)
    cache = CacheLaunch(1 << 35, str(kv), PLENTY_BYTES, None, True, 1 << 34)
    launch = Launch("bench", str(folder), "-", 1 << 15, 8, 1 << 40, 1 << 40, cache=cache)
    engine = made(loaded, launch)
    names = ("the rest alone", "cold", "from memory", "from disk")
    rest, cold, memory, disk = (report.row(name, "s") for name in names)
    ratios: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        ratios.setdefault(name, []).append(value)
        print(f"{name}: {value:.3f}", file=sys.stderr, flush=True)

    await first_token(engine, ids(1, prefix_tokens))
    for turn in range(rounds):
        prefix = ids(100 + turn, prefix_tokens)
        question = lambda place, turn=turn: ids(1000 + turn * 10 + place, REST_TOKENS)  # noqa: E731
        rest.samples.append((await first_token(engine, question(0)))[0])
        cold.samples.append((await first_token(engine, prefix + question(1)))[0])
        await asyncio.sleep(PAUSE_S)
        hit_s, cached = await first_token(engine, prefix + question(2))
        memory.samples.append(hit_s)
        before = records(kv)
        report_of = await durability.flush(engine, 300)
        paths = sorted(records(kv) - before) or sorted(before)
        size = sum(path.stat().st_size for path in paths)
        with tempfile.TemporaryDirectory(dir=kv.parent) as plain:
            plain_s = plain_write_s(paths, Path(plain))
        if report_of.flushed > 8:
            note("writing over plain writes, not synced", plain_s / (report_of.elapsed_ms / 1000))
        engine.stop()
        engine.cache.close()  # type: ignore[union-attr]
        every = sorted(records(kv))
        forget(every)
        engine = made(loaded, launch)
        await engine.loaded
        await first_token(engine, question(4))
        disk_s, from_disk = await first_token(engine, prefix + question(3))
        disk.samples.append(disk_s)
        stats = engine.cache.ssd_stats() if engine.cache is not None else None
        assert stats is not None
        forget(every)
        read_s = plain_read_s(paths)
        note("memory / rest", memory.samples[-1] / rest.samples[-1])
        note("disk / cold", disk_s / cold.samples[-1])
        note("disk / memory", disk_s / memory.samples[-1])
        note(
            "restore over a plain reader",
            stats.restored_bytes / stats.restore_ms / 1e6 / (size / read_s / 1e9),
        )
        note("cached share", min(cached, from_disk) / prefix_tokens)
        note("GB on disk", size / 1e9)
        note("plain reader, GB/s", size / read_s / 1e9)
        note("seconds: rest, cold, memory, disk", 0)
        print([row.samples[-1] for row in (rest, cold, memory, disk)], file=sys.stderr, flush=True)
    engine.stop()
    report.figures |= {name: statistics.median(values) for name, values in ratios.items()}
    for name, limit, at_most in (
        ("memory / rest", HIT_LIMIT, True),
        ("disk / cold", COLD_LIMIT, True),
        ("disk / memory", TWICE_LIMIT, True),
        ("restore over a plain reader", DISK_LIMIT, False),
    ):
        report.targets.append(common.Target(name, report.figures[name], limit, "x", at_most=at_most))


def main() -> int:
    """Measures and prints the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", choices=SHAPES, default="8b", help="random weights of this shape")
    parser.add_argument("--prefix", type=int, default=16_000, help="tokens of the prefix")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    report = common.report("prompt_engine", shape=args.random, prefix=args.prefix)
    with tempfile.TemporaryDirectory() as made_in:
        folder, kv = Path(made_in) / "model", Path(made_in) / "kv"
        folder.mkdir()
        kv.mkdir()
        random_folder(SHAPES[args.random], folder)
        asyncio.run(measure(folder, kv, report, args.rounds, args.prefix))
    status = report.emit()
    sys.stdout.flush()
    # The engine's thread never ends by itself, and a process torn down beside it may abort.
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
