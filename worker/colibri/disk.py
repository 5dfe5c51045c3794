"""Positional reads into memory that is there already, through the page cache or past it.

Past it (`direct`, Linux) offset, length and address have to be whole blocks. `uncached` keeps the page cache
free of what is read: by F_NOCACHE on macOS, elsewhere by dropping the pages afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlxpool.shared.colibri.launch import IoMode

Bytes = npt.NDArray[np.uint8]

# A multiple of every disk's logical block in use; also what a page of memory is at least.
BLOCK_BYTES = 4096
# Per read of those that go through a buffer: as large as a disk is asked for at once, small enough for the
# processor's cache, from which it is copied on.
THROUGH_BYTES = 2 * 2**20
# macOS's fcntl to keep a file's reads out of the page cache; Python's module does not name it everywhere.
F_NOCACHE = 48
# Open files that the rest of a worker may want beside those of the experts.
_OTHER_FILES = 256


class Ended(Exception):
    """The file ends where bytes were due."""


class Scratch(threading.local):
    """Buffers of the calling thread, by name, kept for its next read: [size] at a block's beginning."""

    def __init__(self) -> None:
        self._held: dict[str, Bytes] = {}

    def take(self, name: str, size: int) -> Bytes:
        held = self._held.get(name)
        if held is None or held.nbytes < size:
            held = self._held[name] = blocks(size)
        return held[:size]


def blocks(size: int) -> Bytes:
    """New memory [size] that begins at a block."""
    raw = np.empty(size + BLOCK_BYTES, np.uint8)
    start = -address(raw) % BLOCK_BYTES
    return raw[start : start + size]


def address(array: Bytes) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def in_blocks(offset: int, targets: Sequence[Bytes]) -> bool:
    """Whether a direct read may go into the targets themselves."""
    return offset % BLOCK_BYTES == 0 and all(
        target.nbytes % BLOCK_BYTES == 0 and address(target) % BLOCK_BYTES == 0 for target in targets
    )


def read_into(descriptor: int, offset: int, targets: Sequence[Bytes]) -> None:
    """Fill the targets, one after the other, from the file. Raises OSError, or Ended."""
    left: list[Bytes] = [target for target in targets if target.nbytes]
    end = offset + sum(target.nbytes for target in left)
    while left:
        got = os.preadv(descriptor, left, offset)
        offset += got
        # A direct read that goes on from within a block would be refused for that, not told to have ended.
        if offset < end and (not got or offset >= os.fstat(descriptor).st_size):
            raise Ended(_ended(offset, end))
        while left and got >= left[0].nbytes:
            got -= left.pop(0).nbytes
        if got:
            left[0] = left[0][got:]


def read_through(descriptor: int, offset: int, targets: Sequence[Bytes], buffer: Bytes) -> None:
    """As `read_into`, of whole blocks into `buffer` [whole blocks] and on from there."""
    end = offset + sum(target.nbytes for target in targets)
    pending = list(targets)
    while offset < end:
        # After a read that was cut short within a block, from that block's beginning again.
        place = offset - offset % BLOCK_BYTES
        wanted = min(buffer.nbytes, -(-(end - place) // BLOCK_BYTES) * BLOCK_BYTES)
        got = min(os.preadv(descriptor, [buffer[:wanted]], place), end - place)
        if place + got <= offset:
            raise Ended(_ended(offset, end))
        pending = _spread(buffer[offset - place : got], pending)
        offset = place + got


def _ended(offset: int, end: int) -> str:
    return f"it ends at byte {offset}, where {end - offset} more were due"


def _spread(read: Bytes, targets: list[Bytes]) -> list[Bytes]:
    """Copy into the targets, in turn; returns what is left of them."""
    while read.nbytes:
        first = targets[0]
        fits = min(first.nbytes, read.nbytes)
        np.copyto(first[:fits], read[:fits])
        read = read[fits:]
        targets = [first[fits:], *targets[1:]] if fits < first.nbytes else targets[1:]
    return targets


def drop_pages(descriptor: int, offset: int, size: int) -> None:
    """Let the page cache forget a range that was read. Where the system can't, nothing happens."""
    if sys.platform == "linux":
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)


def prepare(descriptors: Sequence[int], wanted: IoMode) -> tuple[IoMode, str]:
    """Set the files up for the mode that is wanted, or the next best one. Returns the mode in use and why it
    is another than the one asked for, "" where it is not (auto asks for none). Raises OSError where one of
    the files can't be read at all."""
    if wanted == "buffered" or not descriptors:
        return "buffered", ""
    if sys.platform == "darwin":
        for descriptor in descriptors:
            fcntl.fcntl(descriptor, F_NOCACHE, 1)
        return "uncached", "macOS reads past the page cache as `uncached`" if wanted == "direct" else ""
    if wanted == "uncached":
        return "uncached", ""
    refused = _direct(descriptors)
    if refused is None:
        return "direct", ""
    return "buffered", f"the file system refuses direct reads: {refused}"


def _direct(descriptors: Sequence[int]) -> str | None:
    """Make the files' reads direct, all of them or none. Returns why not."""
    probe = blocks(BLOCK_BYTES)
    done: list[int] = []
    try:
        for descriptor in descriptors:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            done.append(descriptor)
            os.preadv(descriptor, [probe], 0)
    except OSError as problem:
        for descriptor in done:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        if problem.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY):
            raise
        return problem.strerror or str(problem)
    return None


def allow_files(count: int) -> None:
    """Raise the process's limit of open files where `count` more would not fit in it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
