"""Positional reads into memory that is there already, through the page cache or past it.

Past it (`direct`, Linux) offset, length and address have to be multiples of what disk and driver transfer.
Tensors in files begin anywhere; so the whole blocks within each go where they belong, all in one read, and
only those that a tensor shares with its neighbours through a buffer. Where the driver wants more of an
address than the tensor's place in the file leaves, everything goes through one. `uncached` keeps the page
cache free of what is read: by F_NOCACHE on macOS, elsewhere by dropping the pages afterwards.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlxpool.shared.colibri.launch import IoMode

Bytes = npt.NDArray[np.uint8]

# A multiple of every disk's logical block in use; also what a page of memory is at least.
BLOCK_BYTES = 4096
# Of offsets and lengths, of addresses: what disks ask for, the least first. Drivers of virtual machines want
# 512 of addresses, NVMe's 4.
_UNITS = ((512, 4), (512, 512), (4096, 4), (4096, 512))
# Per read of those that go through a buffer: as large as a disk is asked for at once, small enough for the
# processor's cache, from which it is copied on.
THROUGH_BYTES = 2 * 2**20
# macOS's fcntl to keep a file's reads out of the page cache; Python's module does not name it everywhere.
F_NOCACHE = 48
# What a system says where a file can't be read directly, or not in these units.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)
# Open files that the rest of a worker may want beside those of the experts.
_OTHER_FILES = 256


class Ended(Exception):
    """The file ends where bytes were due."""


class Unit(NamedTuple):
    """What direct reads have to be multiples of, in bytes: offsets and lengths; addresses."""

    offset: int = BLOCK_BYTES
    address: int = BLOCK_BYTES


class Mode(NamedTuple):
    """io: in use. reason: why it is another than the one asked for, "" where it is not (auto asks for none).
    unit: of direct reads."""

    io: IoMode
    reason: str = ""
    unit: Unit = Unit()


class Pool:
    """Buffers of one kind, kept for their next use: never more than were in use at once. Any thread may call
    it. make: another one."""

    def __init__(self, make: Callable[[], Bytes]) -> None:
        self._make = make
        self._free: list[Bytes] = []

    def take(self) -> Bytes:
        try:
            return self._free.pop()
        except IndexError:
            return self._make()

    def give(self, buffer: Bytes) -> None:
        self._free.append(buffer)

    def clear(self) -> None:
        """Keep none of those that are not in use."""
        self._free.clear()


class Edges(threading.local):
    """Where the calling thread's direct reads put blocks that hold something else too, and all that has to go
    through a buffer: [THROUGH_BYTES] at a block's beginning."""

    def __init__(self) -> None:
        self.buffer = blocks(THROUGH_BYTES)


def blocks(size: int) -> Bytes:
    """New memory [size] that begins at a block."""
    raw = np.empty(size + BLOCK_BYTES, np.uint8)
    start = -address(raw) % BLOCK_BYTES
    return raw[start : start + size]


def address(array: Bytes) -> int:
    place: int = array.__array_interface__["data"][0]
    return place


def read_into(descriptor: int, offset: int, targets: Sequence[Bytes], needed: int | None = None) -> None:
    """Fill the targets, one after the other, from the file. needed: the byte of the file up to which they
    have to be filled, all of it where None. Raises OSError, or Ended."""
    left: list[Bytes] = [target for target in targets if target.nbytes]
    end = offset + sum(target.nbytes for target in left) if needed is None else needed
    while offset < end:
        got = os.preadv(descriptor, [one.data for one in left], offset)
        offset += got
        # A direct read that goes on from within a block would be refused for that, not told to have ended.
        if offset < end and (not got or offset >= os.fstat(descriptor).st_size):
            raise Ended(_ended(descriptor, end))
        while left and got >= left[0].nbytes:
            got -= left.pop(0).nbytes
        if got:
            left[0] = left[0][got:]


def read_direct(descriptor: int, offset: int, targets: Sequence[Bytes], unit: Unit, own: Edges) -> None:
    """As `read_into`, of a file whose reads are direct."""
    end = offset + sum(target.nbytes for target in targets)
    wanted: list[Bytes] = []
    # Parts of targets that share a block with something else, and where in the buffer they come to lie.
    shared: list[tuple[Bytes, int]] = []
    edges = own.buffer
    used = 0
    start = place = offset - offset % unit.offset
    at = offset
    for target in targets:
        until = at + target.nbytes
        first, last = at + -at % unit.offset, until - until % unit.offset
        if first < last and (address(target) + first - at) % unit.address == 0:
            shared.append((target[: first - at], used + at - place))
            wanted += edges[used : used + first - place], target[first - at : last - at]
            used, place = used + first - place, last
            shared.append((target[last - at :], used))
        else:
            shared.append((target, used + at - place))
        at = until
        if used + until - place > THROUGH_BYTES - unit.offset:
            read_through(descriptor, offset, targets, edges)
            return
    wanted.append(edges[used : used + end + -end % unit.offset - place])
    read_into(descriptor, start, wanted, end)
    for part, of in shared:
        np.copyto(part, edges[of : of + part.nbytes])


def read_through(descriptor: int, offset: int, targets: Sequence[Bytes], buffer: Bytes) -> None:
    """As `read_into`, of whole blocks into `buffer` [whole blocks] and on from there."""
    end = offset + sum(target.nbytes for target in targets)
    pending = list(targets)
    while offset < end:
        # After a read that was cut short within a block, from that block's beginning again.
        place = offset - offset % BLOCK_BYTES
        wanted = min(buffer.nbytes, -(-(end - place) // BLOCK_BYTES) * BLOCK_BYTES)
        got = min(os.preadv(descriptor, [buffer[:wanted].data], place), end - place)
        if place + got <= offset:
            raise Ended(_ended(descriptor, end))
        pending = _spread(buffer[offset - place : got], pending)
        offset = place + got


def _ended(descriptor: int, end: int) -> str:
    """Why a read up to byte `end` ended before."""
    size = min(os.fstat(descriptor).st_size, end)
    return f"it ends at byte {size}, where {end - size} more were due"


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


def prepare(descriptors: Sequence[int], wanted: IoMode) -> Mode:
    """Set the files up for the mode that is wanted, or the next best one. Raises OSError where one of the
    files can't be read at all."""
    if wanted == "buffered" or not descriptors:
        return Mode("buffered")
    if sys.platform == "darwin":
        for descriptor in descriptors:
            fcntl.fcntl(descriptor, F_NOCACHE, 1)
        return Mode("uncached", "macOS reads past the page cache as `uncached`" if wanted == "direct" else "")
    if wanted == "uncached":
        return Mode("uncached")
    units: list[Unit] = []
    try:
        for descriptor in descriptors:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            units.append(_unit(descriptor))
    except OSError as problem:
        for descriptor in descriptors:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        if problem.errno not in _REFUSALS:
            raise
        refused = problem.strerror or str(problem)
        return Mode("buffered", f"the file system refuses direct reads: {refused}")
    return Mode("direct", unit=Unit(max(unit.offset for unit in units), max(unit.address for unit in units)))


def _unit(descriptor: int) -> Unit:
    """What the file's reads have to be multiples of, found out by trying. Raises OSError where not even whole
    blocks can be read."""
    memory = blocks(4 * BLOCK_BYTES)
    for offset, address_step in _UNITS:
        # More than a page, from within one: less is taken by drivers that would refuse a real read.
        target = memory[address_step : address_step + 2 * BLOCK_BYTES]
        try:
            whole = os.preadv(descriptor, [target.data], offset) == target.nbytes
        except OSError as problem:
            if problem.errno not in _REFUSALS:
                raise
        else:
            # A file too short to tell by.
            return Unit(offset, address_step) if whole else Unit()
    os.preadv(descriptor, [memory.data], 0)
    return Unit()


def allow_files(count: int) -> None:
    """Raise the process's limit of open files where `count` more would not fit in it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _OTHER_FILES
    if soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
