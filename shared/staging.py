"""How a model gets into home/models: put together in a hidden folder, then given its name in one rename.

Whatever has a name without a leading dot under home/models is whole, whenever its maker was killed. A maker
holds the model's lock while it works in the stage; the system releases it however the process ends. What a
killed one has left in the stage is the next one's to go on with. Who is done takes the lock's file away.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from mlxpool.shared.files import sync

MANIFEST_FILE = "mlxpool-manifest.json"
COPY_BYTES = 1 << 20


class PullError(Exception):
    """The model could not be fetched; one line that says what to do. What is staged stays for a next try."""


class ManifestFile(msgspec.Struct, frozen=True):
    """One published file."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was published: where it came from, and every file with size and hash.

    source_sha256: of the one file a model was made of. revision, commit: of a repository, as asked for and as
    it was then.
    """

    model: str
    source: str
    files: dict[str, ManifestFile]
    source_sha256: str | None = None
    revision: str | None = None
    commit: str | None = None


def key_of(model: str) -> str:
    """A model's name as one hidden file's name can hold it; no name of a model there holds `--` and a `/`."""
    return model.replace("/", "--")


def stage_folder(models: Path, model: str) -> Path:
    """Where a model is put together."""
    return models / f".staging-{key_of(model)}"


@contextlib.contextmanager
def locked(models: Path, model: str, waiting: Callable[[], None] | None) -> Iterator[None]:
    """Be the only one who works in the model's stage.

    waiting: called once where another one is at it, and then waited for; None = raises PullError there.
    """
    lock = models / f".{key_of(model)}.lock"
    told = False
    while True:
        with lock.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting is None:
                    raise PullError(f"another pull of {model} is running; wait for it to end") from None
                if not told:
                    waiting()
                told = True
                fcntl.flock(file, fcntl.LOCK_EX)
            # Who had it before took its name away: who comes next will lock another file.
            if not _is_named(file, lock):
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    lock.unlink()
            return


def _is_named(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one that `path` leads to."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a published model, None where it has none that can be read."""
    try:
        return msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def publish(stage: Path, target: Path, manifest: Manifest) -> None:
    """Add the manifest, and give the stage its name. Raises OSError."""
    (stage / MANIFEST_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    target.parent.mkdir(exist_ok=True)
    give_name(stage, target)


def give_name(stage: Path, target: Path) -> None:
    """Make the stage's files durable, and rename the stage to `target`. Raises OSError."""
    for path in stage.rglob("*"):
        sync(path)
    sync(stage)
    os.rename(stage, target)
    sync(target.parent)


def sha256_of(path: Path) -> str:
    """In hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
