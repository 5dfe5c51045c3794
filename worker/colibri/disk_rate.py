"""The disk's own rate: threads that read as many bytes in one piece as an expert has, and do nothing else.

What streaming is measured against. Each place is read once and past the page cache, and where the file system
has no such reads its pages are dropped first, so nothing is measured that memory gave.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri.launch import IoMode
from mlxpool.shared.colibri.layout import Artifact, Strided
from mlxpool.shared.files import open_regular
from mlxpool.worker.colibri import disk

# Long enough for a disk to have woken up, short beside anything that is measured with it.
SECONDS = 2.0


class DiskRate(NamedTuple):
    """io: how it was read. read_bytes: of one read."""

    bytes_per_s: float
    reads: int
    read_bytes: int
    seconds: float
    io: IoMode


def places(sizes: Mapping[str, int], read_bytes: int, seed: int = 0) -> list[tuple[str, int]]:
    """Each file cut into reads that don't overlap, (file, offset) in an order that no disk expects. What is
    left of a file behind its last whole read isn't read."""
    found = [
        (name, offset)
        for name, size in sizes.items()
        for offset in range(0, size - read_bytes + 1, read_bytes)
    ]
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[place] for place in order.tolist()]


def measure(artifact: Artifact, depth: int, seconds: float = SECONDS) -> DiskRate:
    """The rate at `depth` reads at once, for so long or until every place has been read.

    Raises CheckpointError where a file can't be read.
    """
    record = max(layout.record_bytes for layout in artifact.layers)
    read_bytes = -(-record // disk.BLOCK_BYTES) * disk.BLOCK_BYTES
    files = {}
    try:
        for name in expert_files(artifact):
            files[name] = open_regular(Path(artifact.folder) / name)
        descriptors = {name: file.fileno() for name, file in files.items()}
        sizes = {name: os.fstat(one).st_size for name, one in descriptors.items()}
        mode = disk.prepare(list(descriptors.values()), "auto")
        if mode.io == "buffered":
            for name, one in descriptors.items():
                disk.drop_pages(one, 0, sizes[name])
        # Experts that are larger than any file of theirs are of tiny models.
        read_bytes = min(read_bytes, max(sizes.values()) // disk.BLOCK_BYTES * disk.BLOCK_BYTES)
        if read_bytes == 0:
            read_bytes = max(sizes.values())
        wanted = [(descriptors[name], offset) for name, offset in places(sizes, read_bytes)]
        reads, took_s = _read(wanted, read_bytes, depth, seconds)
    except (OSError, disk.Ended) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else None
        raise CheckpointError(f"the disk can't be measured: {reason or problem}") from None
    finally:
        for file in files.values():
            file.close()
    return DiskRate(reads * read_bytes / took_s, reads, read_bytes, took_s, mode.io)


def expert_files(artifact: Artifact) -> list[str]:
    """Names of the files that hold experts."""
    names = set()
    for layout in artifact.layouts.values():
        for piece in layout.pieces:
            places = piece.places
            names |= (
                {places.file} if isinstance(places, Strided) else {places.files[one] for one in places.of}
            )
    return sorted(names)


def drop_all_pages(artifact: Artifact) -> None:
    """Let the page cache forget the experts. Where the system can't, nothing happens."""
    for name in expert_files(artifact):
        with open_regular(Path(artifact.folder) / name) as file:
            disk.drop_pages(file.fileno(), 0, os.fstat(file.fileno()).st_size)


def _read(
    wanted: Sequence[tuple[int, int]], read_bytes: int, depth: int, seconds: float
) -> tuple[int, float]:
    """How many places were read, and the seconds that took. Raises what a read raises."""
    left = deque(wanted)
    problems: list[Exception] = []
    done = [0] * depth
    # Touched beforehand, as a slot's memory is.
    buffers = [disk.blocks(read_bytes) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = 1
    began_s = time.perf_counter()

    def work(number: int) -> None:
        try:
            while not problems and time.perf_counter() - began_s < seconds:
                descriptor, offset = left.popleft()
                disk.read_into(descriptor, offset, [buffers[number]])
                done[number] += 1
        except IndexError:
            return
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - began_s
    if problems:
        raise problems[0]
    return sum(done), took_s
