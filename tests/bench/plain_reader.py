"""The disk's own rate: threads that make the requests that reading experts takes, and do nothing else."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mlxpool.shared.colibri import layout
from mlxpool.worker.colibri import disk
from mlxpool.worker.colibri.segments import runs

# Of experts, in memory that is read into by turns, as slots are: what a disk has just written to is in the
# processor's caches, and faster to write to.
SLOTS = 18


class PlainReader:
    """Whole blocks around what each expert's parts take on disk, a request for each place where they lie side
    by side. depth: threads, each of which makes one request after another. direct: past the page cache."""

    def __init__(
        self, folder: Path, layouts: Sequence[layout.ExpertLayout], depth: int, direct: bool
    ) -> None:
        self._files: dict[str, int] = {}
        self._requests = {
            of.layer: [self._of(folder, of, one) for one in range(of.experts)] for of in layouts
        }
        disk.prepare(list(self._files.values()), "direct" if direct else "buffered")
        self._ends = {one: os.fstat(one).st_size for one in self._files.values()}
        experts = itertools.chain.from_iterable(self._requests.values())
        widest = max(size for _, _, size in itertools.chain.from_iterable(experts))
        self._asked: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        count = max(SLOTS * max(of.record_bytes for of in layouts) // widest, 2 * depth)
        # In one piece, for which numpy asks for huge pages, and touched beforehand, as slots are.
        self._memory = disk.blocks(count * widest)
        self._memory[:] = 1
        self._places = itertools.cycle(range(0, count * widest, widest))
        for _ in range(depth):
            threading.Thread(target=self._work, daemon=True).start()
        self._depth = depth

    def _of(self, folder: Path, expert: layout.ExpertLayout, one: int) -> list[tuple[int, int, int]]:
        """Descriptor, offset and size of each request."""
        sizes = [piece.size_bytes for piece in expert.pieces]
        made = []
        for run in runs(expert, one):
            if run.file not in self._files:
                self._files[run.file] = os.open(folder / run.file, os.O_RDONLY)
            start = run.offset // disk.BLOCK_BYTES * disk.BLOCK_BYTES
            end = run.offset + sum(sizes[index] for index in run.pieces)
            made.append((self._files[run.file], start, _whole_blocks(end - start)))
        return made

    def _work(self) -> None:
        while (request := self._asked.get()) is not None:
            descriptor, start, size = request
            place = next(self._places)
            target = self._memory[place : place + size]
            disk.read_into(descriptor, start, [target], min(start + size, self._ends[descriptor]))
            self._done.put(size)

    def read(self, layer: int, experts: Sequence[int]) -> float:
        """Seconds until all of them have been read."""
        requests = [request for one in experts for request in self._requests[layer][one]]
        began = time.perf_counter()
        for request in requests:
            self._asked.put(request)
        for _ in requests:
            self._done.get()
        return time.perf_counter() - began

    def close(self) -> None:
        """Nothing may be under way."""
        for _ in range(self._depth):
            self._asked.put(None)
        for descriptor in self._files.values():
            os.close(descriptor)


def _whole_blocks(size: int) -> int:
    return -(-size // disk.BLOCK_BYTES) * disk.BLOCK_BYTES
