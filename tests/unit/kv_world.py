"""Records with content, on a real folder: what the tests of the disk tier share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlxpool.shared.kv.names import blocks
from mlxpool.shared.kv.record_file import Tensor
from mlxpool.worker.cache import records
from mlxpool.worker.cache.fingerprint import Fingerprint
from mlxpool.worker.cache.records import Ids, Piece, Record
from mlxpool.worker.cache.ssd import Reading, SsdTier
from mlxpool.worker.cache.writer import Waiting, Writer

MARK = Fingerprint("ab" * 16, {"config": "c", "weights": "w"})
OTHER_MARK = Fingerprint("cd" * 16, {"config": "c", "weights": "other"})
ROOT_NAME = records.root("a model")
PLENTY = 1 << 30
# A wait that passes it is a failure, never a pass.
PATIENCE_S = 60.0


def tokens(count: int, first: int = 0) -> Ids:
    """Ids that are different for every start."""
    return np.arange(first, first + count, dtype=np.uint32)


def chain(ids: Ids) -> list[tuple[Record, Ids]]:
    """A prefix's records, each with its own ids."""
    return [(record, ids[record.start : record.end]) for record in records.chain(ROOT_NAME, ids)]


def waiting(record: Record, ids: Ids, kind: records.Kind = "slice", floats: int = 600) -> Waiting:
    """A piece with two tensors, whose values follow from its name, and scalars if it is a state."""
    seed = int.from_bytes(record.name[:4], "little")
    noise = np.random.default_rng(seed)
    keys = noise.standard_normal((2, floats // 2), dtype=np.float32)
    values = noise.integers(0, 2**16, size=(3, 5), dtype=np.uint16)
    return Waiting(
        Piece(record, kind),
        ids,
        {"0.keys": Tensor("F32", keys.shape), "0.values": Tensor("BF16", values.shape)},
        {"0.keys": keys, "0.values": values},
        {"0": [record.end, 7]} if kind == "state" else {},
    )


def open_tier(root: Path, max_bytes: int = PLENTY, mark: Fingerprint = MARK, **more: Any) -> SsdTier:
    tier = SsdTier(root, mark, "a model", max_bytes, more.pop("verify", True), **more)
    tier.open()
    return tier


def write(tier: SsdTier, items: Sequence[Waiting]) -> None:
    """Has all of it written, and says so if not."""
    writer = Writer(tier, PLENTY, lambda: False, lambda piece, durable: None)
    for item in items:
        writer.offer(item)
    assert writer.flush(PATIENCE_S), writer.off
    writer.close()


def written(root: Path, ids: Ids, floats: int = 600) -> tuple[SsdTier, list[Waiting]]:
    """A tier with the slices of this prefix on disk."""
    tier = open_tier(root)
    items = [waiting(record, own, floats=floats) for record, own in chain(ids)]
    write(tier, items)
    return tier, items


def slices(count: int) -> list[Waiting]:
    return [waiting(record, own) for record, own in chain(tokens(256 * count))]


class Held:
    """A writer that stands still before its first step until it is let go, and what it said."""

    def __init__(
        self, tier: SsdTier, queue_bytes: int = PLENTY, busy: Callable[[], bool] = lambda: False
    ) -> None:
        self.said: list[tuple[Piece, bool]] = []
        self.now = 0.0
        self.entered = threading.Event()
        self._gate = threading.Event()
        self.writer = Writer(tier, queue_bytes, self._busy(busy), self.wrote, clock=lambda: self.now)

    def _busy(self, busy: Callable[[], bool]) -> Callable[[], bool]:
        def ask() -> bool:
            self.entered.set()
            assert self._gate.wait(PATIENCE_S)
            return busy()

        return ask

    def wrote(self, piece: Piece, durable: bool) -> None:
        self.said.append((piece, durable))

    def begin(self, item: Waiting) -> None:
        """Offers a piece and waits until it is being written."""
        self.writer.offer(item)
        assert self.entered.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._gate.set()


class Restore:
    """One reading, driven as an engine would; `between` runs when the heads are known, before the data."""

    def __init__(self, tier: SsdTier, pieces: Sequence[Piece], between: Any = None) -> None:
        self.arrays: dict[Piece, dict[str, Any]] = {}
        self._woken = threading.Semaphore(0)
        self.reading: Reading = tier.begin(pieces, self._woken.release)
        self.wait()
        if self.reading.phase == "allocate":
            if between is not None:
                between()
            self.arrays = {piece: empty(head) for piece, head in self.reading.heads.items()}
            self.reading.fill(self.arrays.items())
            self.wait()
        assert self.reading.phase == "done"

    def wait(self) -> None:
        assert self._woken.acquire(timeout=PATIENCE_S)

    def holds(self, item: Waiting) -> bool:
        """Whether a piece came back just as it was written."""
        if item.piece in self.reading.bad or item.piece not in self.arrays:
            return False
        head, arrays = self.reading.heads[item.piece], self.arrays[item.piece]
        return (
            head.ids == tuple(item.ids)
            and head.scalars == item.scalars
            and head.tensors == item.tensors
            and all(np.array_equal(arrays[name], item.buffers[name]) for name in item.buffers)
        )


def empty(head: Any) -> dict[str, Any]:
    kinds = {"F32": np.float32, "BF16": np.uint16}
    return {name: np.empty(tensor.shape, kinds[tensor.dtype]) for name, tensor in head.tensors.items()}


def on_disk(root: Path) -> int:
    """What `du` would say of the files, in bytes: whole blocks, links and folders left out."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += blocks(os.lstat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:
                continue
    return total


def files(root: Path) -> list[str]:
    """Names of all files but the ledger and the descriptions, sorted."""
    skipped = {"ledger", "about.json"}
    return sorted(name for _, _, names in os.walk(root) for name in names if name not in skipped)
