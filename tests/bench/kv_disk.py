"""The disk tier against the disk: restoring and writing over plain reads and writes of the same bytes.

Pairs in turn, one process. Files are synced and dropped from the page cache before every read, where the
system lets a program do that; on others both sides read from memory. Writes are timed twice: until they are
with the system, as the tier leaves them, and until they are on the disk. Beside it what a start with 10,000
files costs, and what a write pays for the budget.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from mlxpool.shared.kv.budget import Budget
from mlxpool.shared.kv.names import FileName, file_name
from mlxpool.shared.kv.record_file import READ_STEP_BYTES, Tensor
from mlxpool.worker.cache import records
from mlxpool.worker.cache.fingerprint import Fingerprint
from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.writer import Waiting, Writer
from tests.bench import common

RESTORE_OF_RAW = 0.8
WRITE_OF_RAW = 0.7
OPEN_LIMIT_S = 0.3
FILES = 10_000
# Keys and values of 16 layers: what 256 tokens of a small model come to.
TENSORS, TENSOR_FLOATS = 32, 65536
PLENTY = 1 << 40
MARK = Fingerprint("ab" * 16, {})


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    args = parser.parse_args()
    count = max(2, args.megabytes * 2**20 // (TENSORS * TENSOR_FLOATS * 4))
    report = common.report("kv_disk", rounds=args.rounds, records=count, tensor_bytes=TENSOR_FLOATS * 4)
    rates = {
        name: report.row(name, "GB/s")
        for name in (
            "restore",
            "restore, unverified",
            "plain read",
            "write",
            "plain write",
            "write, synced",
            "plain write, synced",
        )
    }
    items = made(count)
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="mlxpool-bench-", dir=args.folder) as scratch:
            root = Path(scratch)
            for name, way, folder in (
                ("plain write", plain_write, root / "plain"),
                ("write", write, root / "kv"),
            ):
                begun = time.perf_counter()
                way(folder, items)
                written = time.perf_counter()
                forget(folder)
                rates[name].samples.append(bytes_of(items) / (written - begun) / 1e9)
                rates[f"{name}, synced"].samples.append(bytes_of(items) / (time.perf_counter() - begun) / 1e9)
            for name, verify in (("restore", True), ("restore, unverified", False)):
                rates[name].samples.append(restore(root / "kv", items, verify))
            rates["plain read"].samples.append(plain_read(root / "kv" / MARK.hash))
    for ours, raw in (
        ("restore", "plain read"),
        ("restore, unverified", "plain read"),
        ("write", "plain write"),
        ("write, synced", "plain write, synced"),
    ):
        pairs = zip(rates[ours].samples, rates[raw].samples, strict=True)
        report.figures[f"{ours} over {raw}"] = statistics.median(mine / plain for mine, plain in pairs)
    opening = report.row(f"open() of {FILES} files", "s")
    reserve = report.row("room reserved, published, removed", "µs")
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-", dir=args.folder) as scratch:
        fill(Path(scratch))
        opening.samples += [timed_open(Path(scratch)) for _ in range(5)]
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-", dir=args.folder) as scratch:
        reserve.samples += one_by_one(Path(scratch))
    report.targets = [
        common.Target(name, report.figures[name], limit, "", at_most=False)
        for name, limit in (
            ("restore over plain read", RESTORE_OF_RAW),
            ("write, synced over plain write, synced", WRITE_OF_RAW),
        )
    ]
    report.targets.append(
        common.Target(f"open() of {FILES} files", opening.settle().median, OPEN_LIMIT_S, "s")
    )
    return report.emit()


def made(count: int) -> list[Waiting]:
    """Records of one prefix with noise in them."""
    shape = (count, TENSORS, TENSOR_FLOATS)
    noise = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    ids = np.arange(count * records.RECORD_TOKENS, dtype=np.uint32)
    items = []
    for own, record in zip(noise, records.chain(records.root("bench"), ids), strict=True):
        arrays = {f"{place}.keys": own[place] for place in range(TENSORS)}
        tensors = {name: Tensor("F32", array.shape) for name, array in arrays.items()}
        items.append(Waiting(Piece(record, "slice"), ids[record.start : record.end], tensors, arrays))
    return items


def bytes_of(items: list[Waiting]) -> int:
    return sum(item.nbytes for item in items)


def plain_write(folder: Path, items: list[Waiting]) -> None:
    """As many files of the same bytes."""
    folder.mkdir()
    for place, item in enumerate(items):
        descriptor = os.open(folder / str(place), os.O_CREAT | os.O_WRONLY)
        for array in item.buffers.values():
            os.write(descriptor, array.data)
        os.close(descriptor)


def write(root: Path, items: list[Waiting]) -> None:
    """A flush of all of it."""
    tier = SsdTier(root, MARK, "bench", PLENTY, True)
    tier.open()
    writer = Writer(tier, PLENTY, lambda: False, lambda piece, durable: None)
    for item in items:
        writer.offer(item)
    if not writer.flush(600):
        raise RuntimeError(f"not written: {writer.off}")
    writer.close()


def forget(folder: Path) -> None:
    """Has the files read from the disk next time."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def restore(root: Path, items: list[Waiting], verify: bool) -> float:
    """GB/s from the question to the last byte, into memory that has been touched."""
    forget(root / MARK.hash)
    tier = SsdTier(root, MARK, "bench", PLENTY, verify)
    tier.open()
    buffers = {item.piece: {n: np.ones(a.shape, a.dtype) for n, a in item.buffers.items()} for item in items}
    woken = threading.Semaphore(0)
    begun = time.perf_counter()
    reading = tier.begin([item.piece for item in items], woken.release)
    woken.acquire()
    reading.fill(buffers.items())
    woken.acquire()
    took = time.perf_counter() - begun
    if reading.bad or not np.array_equal(buffers[items[-1].piece]["0.keys"], items[-1].buffers["0.keys"]):
        raise RuntimeError("not what was written")
    tier.close()
    return bytes_of(items) / took / 1e9


def plain_read(folder: Path) -> float:
    """GB/s of the same files, one after the other, into memory that has been touched."""
    forget(folder)
    paths = sorted(folder.glob("*.safetensors"))
    buffer = np.ones(READ_STEP_BYTES, np.uint8).data
    total = 0
    begun = time.perf_counter()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        while got := os.readv(descriptor, [buffer]):
            total += got
        os.close(descriptor)
    return total / (time.perf_counter() - begun) / 1e9


def fill(root: Path) -> None:
    """Empty files with records' names."""
    folder = root / MARK.hash
    folder.mkdir(parents=True)
    parent = records.root("bench")
    for place in range(FILES):
        name = os.urandom(16)
        file = FileName(name, parent, place * 256, place * 256 + 256, "slice")
        os.close(os.open(folder / file_name(file), os.O_CREAT | os.O_WRONLY))
        parent = name


def timed_open(root: Path) -> float:
    tier = SsdTier(root, MARK, "bench", PLENTY, True)
    begun = time.perf_counter()
    tier.open()
    took = time.perf_counter() - begun
    if tier.entries != FILES:
        raise RuntimeError("not all found")
    return took


def one_by_one(root: Path) -> list[float]:
    """µs of everything about a write but its bytes."""
    budget = Budget(root, PLENTY)
    took = []
    for _ in range(500):
        file = FileName(os.urandom(16), b"p" * 16, 0, 256, "slice")
        begun = time.perf_counter()
        temp = budget.create(MARK.hash, 100).temp
        if temp is None:
            raise RuntimeError("no room")
        budget.publish(temp, file_name(file))
        os.close(temp.descriptor)
        budget.remove(root / MARK.hash / file_name(file))
        took.append((time.perf_counter() - begun) * 1e6)
    return took


if __name__ == "__main__":
    sys.exit(main())
