"""The disk's own rate: threads that read as many bytes in one piece each, and do nothing else."""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from mlxpool.shared.colibri import layout
from mlxpool.worker.colibri import disk


class PlainReader:
    """Reads of an expert's size from the file that a layer's experts are in. direct: past the page cache."""

    def __init__(self, folder: Path, expert: layout.ExpertLayout, depth: int, direct: bool) -> None:
        self._size = -(-expert.record_bytes // disk.BLOCK_BYTES) * disk.BLOCK_BYTES
        file = folder / expert.pieces[0].places.at(0)[0]
        self._descriptor = os.open(file, os.O_RDONLY)
        disk.prepare([self._descriptor], "direct" if direct else "buffered")
        self._step = (file.stat().st_size - self._size) // max(expert.experts - 1, 1)
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        for _ in range(depth):
            # The memory is touched beforehand, as a slot's is.
            buffer = disk.blocks(self._size)
            buffer[:] = 1
            threading.Thread(target=self._work, args=(buffer,), daemon=True).start()
        self._depth = depth

    def _work(self, buffer: Any) -> None:
        while (expert := self._asked.get()) is not None:
            place = expert * self._step // disk.BLOCK_BYTES * disk.BLOCK_BYTES
            disk.read_into(self._descriptor, place, [buffer])
            self._done.put(expert)

    def read(self, experts: list[int]) -> float:
        """Seconds until all of them have been read."""
        began = time.perf_counter()
        for expert in experts:
            self._asked.put(expert)
        for _ in experts:
            self._done.get()
        return time.perf_counter() - began

    def close(self) -> None:
        for _ in range(self._depth):
            self._asked.put(None)
