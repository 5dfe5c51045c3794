"""What lies under the root of the prompt cache, told from names, sizes and times of writing alone.

The root holds a ledger and one folder per model, called by its fingerprint; nothing else there is ours, and
links are never followed. A file in a model's folder is a record, a file that is being written, the folder's
description, a record of a spelling that nobody reads any more ("foreign"), or not ours: somebody's own file
is left where it is and counts for nothing.

Reads only. What vanishes while it is listed was not there.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mlxpool.shared.kv.names import (
    ABOUT_FILE,
    BLOCK_BYTES,
    LEDGER_FILE,
    SUFFIX,
    FileName,
    TempName,
    blocks,
    is_folder,
    parse,
    parse_temp,
)


class Stored(msgspec.Struct, frozen=True):
    """A record's file. bytes: whole blocks. used_s: when it was last used, unix seconds."""

    folder: str
    file: FileName
    path: str
    bytes: int
    used_s: float


class Unfinished(msgspec.Struct, frozen=True):
    """A file that is being written, or was when its writer ended. bytes: what its name says."""

    path: str
    name: TempName


class Listing(msgspec.Struct):
    """Everything of ours under a root. about_bytes: what descriptions take, by folder. unread: why folders
    could not be listed to their ends; what is in them is not all here then. reaped: unfinished files that
    budget.py has deleted since."""

    folders: list[str] = []
    records: list[Stored] = []
    unfinished: list[Unfinished] = []
    foreign: list[str] = []
    about_bytes: dict[str, int] = {}
    unread: list[OSError] = []
    reaped: list[Unfinished] = []

    @property
    def bytes(self) -> int:
        """What all of it counts for in the budget, the ledger included."""
        return (
            BLOCK_BYTES
            + sum(record.bytes for record in self.records)
            + sum(temp.name.bytes for temp in self.unfinished)
            + sum(self.about_bytes.values())
        )


def model_folders(root: Path) -> list[str]:
    """Names of the models' folders, [] where there is no root. Raises OSError."""
    try:
        with os.scandir(root) as entries:
            return sorted(
                entry.name
                for entry in entries
                if is_folder(entry.name) and entry.is_dir(follow_symlinks=False)
            )
    except FileNotFoundError:
        return []


def records_in(root: Path, folder: str) -> list[Stored]:
    """The records of one model, [] where it has no folder. Raises OSError."""
    listing = Listing()
    _list_folder(root, folder, listing)
    return listing.records


def list_root(root: Path) -> Listing:
    """All of it; of a folder that can't be read, what could be. Raises OSError where the root can't be."""
    listing = Listing()
    for folder in model_folders(root):
        try:
            _list_folder(root, folder, listing)
        except OSError as problem:
            listing.unread.append(problem)
            continue
        listing.folders.append(folder)
    return listing


def _list_folder(root: Path, folder: str, listing: Listing) -> None:
    for entry in _entries(root / folder):
        try:
            if not entry.is_file(follow_symlinks=False):
                continue
            if (file := parse(entry.name)) is not None:
                status = entry.stat(follow_symlinks=False)
                size = blocks(status.st_size)
                listing.records.append(Stored(folder, file, entry.path, size, status.st_mtime))
            elif (temp := parse_temp(entry.name)) is not None:
                listing.unfinished.append(Unfinished(entry.path, temp))
            elif entry.name == ABOUT_FILE:
                listing.about_bytes[folder] = blocks(entry.stat(follow_symlinks=False).st_size)
            elif entry.name.endswith(SUFFIX):
                listing.foreign.append(entry.path)
        except FileNotFoundError:
            continue


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What the folder holds; a folder that is gone, or that is a link, holds nothing."""
    if folder.is_symlink():
        return
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return


def has_writer(temp: Unfinished) -> bool:
    """Whether somebody still writes this file. Its writer holds a lock on it, which ends with the process;
    the number of a process alone may be another one's by now."""
    try:
        os.kill(temp.name.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    try:
        descriptor = os.open(temp.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def ledger_path(root: Path) -> Path:
    """The file whose lock guards every change under the root."""
    return root / LEDGER_FILE
