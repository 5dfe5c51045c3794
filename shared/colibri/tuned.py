"""What `mlxpool colibri tune` found to pay on this machine, per artifact and backend.

One JSON file in the home. It is a memory of measurements and never a condition: whatever is wrong with it is
told as a reason and otherwise as if nothing had been measured. It is replaced whole, so a reader sees the old
one or the new one. Entries are found by a fingerprint of config and files, so a copy of a folder keeps what
was found, and a changed one does not.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import UNREADABLE, CheckpointError
from mlxpool.shared.colibri.folder import HOME_FOLDER
from mlxpool.shared.colibri.launch import IoMode
from mlxpool.shared.colibri.layout import Artifact
from mlxpool.shared.files import open_regular, write_whole

FILE_NAME = "tuned.json"
VERSION = 1
# A thousand models' entries are below a megabyte.
_MAX_FILE_BYTES = 4 * 2**20

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Tuned(msgspec.Struct, frozen=True, omit_defaults=True):
    """One artifact's. What was not tried is None. slots: beyond which more did not pay. when: unix seconds.

    disk_bytes_per_s: of reads of an expert's size at this depth. tok_per_s: decoding, with these settings.
    """

    slots: Annotated[int, msgspec.Meta(ge=1)] | None = None
    io: IoMode | None = None
    prefetch: bool | None = None
    overlap: bool | None = None
    mtp: bool | None = None
    queue_depth: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    disk_bytes_per_s: _Positive | None = None
    tok_per_s: _Positive | None = None
    when: float = 0.0


class _File(msgspec.Struct, frozen=True):
    version: int
    entries: dict[str, Tuned]


class Kept(msgspec.Struct, frozen=True):
    """What the file holds. problem: why it counts as empty although it is there."""

    entries: dict[str, Tuned]
    problem: str | None = None

    def of(self, fingerprint: str, backend: Backend) -> Tuned:
        """What was found for this artifact; nothing where it was not tuned."""
        return self.entries.get(_key(fingerprint, backend), Tuned())


def path(home: Path) -> Path:
    """Of the file."""
    return home / HOME_FOLDER / FILE_NAME


def read(home: Path) -> Kept:
    """What is kept. Never fails."""
    try:
        with open_regular(path(home)) as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            return Kept({}, f"{FILE_NAME} is larger than {_MAX_FILE_BYTES} bytes")
        kept = msgspec.json.decode(raw, type=_File)
    except FileNotFoundError:
        return Kept({})
    except OSError as problem:
        return Kept({}, f"{FILE_NAME} can't be read: {problem.strerror}")
    except UNREADABLE as problem:
        return Kept({}, f"{FILE_NAME} is damaged: {problem}")
    if kept.version != VERSION:
        return Kept({}, f"{FILE_NAME} is of version {kept.version}, not {VERSION}")
    return Kept(kept.entries)


def keep(home: Path, fingerprint: str, backend: Backend, found: Tuned) -> None:
    """Keep what was found, beside the other entries. A damaged file is replaced. Raises OSError."""
    target = path(home)
    target.parent.mkdir(parents=True, exist_ok=True)
    entries = {**read(home).entries, _key(fingerprint, backend): found}
    raw = msgspec.json.format(msgspec.json.encode(_File(VERSION, entries)), indent=1)
    write_whole(target, lambda file: file.write(raw))


def fingerprint(artifact: Artifact) -> str:
    """Of an artifact's config, and its files' names and sizes: not of where it lies or when it was written.

    Raises CheckpointError where one of its files is gone.
    """
    digest = hashlib.blake2b(msgspec.json.encode(artifact.config, order="sorted"), digest_size=16)
    for name in sorted(artifact.files):
        try:
            size_bytes = os.stat(os.path.join(artifact.folder, name)).st_size
        except OSError as problem:
            raise CheckpointError(f"{name}: can't be read: {problem.strerror}") from None
        digest.update(f"\0{name}\0{size_bytes}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _key(fingerprint: str, backend: Backend) -> str:
    return f"{fingerprint}:{backend}"
