"""Opening files that somebody else has put there, and replacing whole ones of our own."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# Of a file that is being written.
PART_SUFFIX = ".part"


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading. Raises OSError, also where the path leads to anything but a regular file.

    Reading a pipe or a device could wait for ever, and the server with it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def write_whole(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Put a file in its place that is whole once it has its name; a reader sees the old one or the new one.

    durable: it and its name are on the disk when this returns. Several processes may do it at once. What a
    killed one leaves ends in PART_SUFFIX. Raises OSError with a file's name, and what `write` raises.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}{PART_SUFFIX}")
    try:
        with part.open("wb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.rename(part, path)
    except BaseException as problem:
        part.unlink(missing_ok=True)
        if isinstance(problem, OSError) and problem.errno is not None and problem.filename is None:
            # A full disk is met through a descriptor: the system doesn't say which file's.
            problem.filename = str(path)
        raise
    if durable:
        sync(path.parent)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
