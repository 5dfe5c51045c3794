"""The folder of the prompt cache as a whole: cleaned at the parent's start, shown and pruned for its owner.

One folder per fingerprint with an `about.json` for people: which model, and what went into the fingerprint.
Only `scan` and `prune` go by it: a worker uses a folder without one, or with a broken one, as any, and mends
it.

Every change is made under the ledger's lock (budget.py), so it may run while workers write.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mlxpool.shared.files import open_regular
from mlxpool.shared.kv.budget import Budget, Ledger, evict, reconcile
from mlxpool.shared.kv.eviction import victims
from mlxpool.shared.kv.listing import Listing, Stored, model_folders, records_in
from mlxpool.shared.kv.names import ABOUT_FILE
from mlxpool.shared.kv.record_file import verdict_on

# A description is a kilobyte; what is larger is not one.
_MAX_ABOUT_BYTES = 64 * 1024


class About(msgspec.Struct, frozen=True):
    """A model's folder, for people. ingredients: what went into the fingerprint, by name."""

    model: str
    fingerprint: str
    ingredients: dict[str, str] = {}


class Cleaned(msgspec.Struct, frozen=True):
    """What `clean` did. unfinished, foreign, evicted: files deleted. entries, bytes: records left."""

    unfinished: int
    foreign: int
    evicted: int
    entries: int
    bytes: int


class Pruned(msgspec.Struct, frozen=True):
    """What `prune` deleted, and what is left."""

    entries: int
    bytes: int
    left_entries: int
    left_bytes: int


class FolderUse(msgspec.Struct, frozen=True):
    """One model's folder. model: "" where its description can't be read. bytes: of its records.
    last_used_s: unix seconds, None where it holds no record."""

    fingerprint: str
    model: str
    entries: int
    bytes: int
    last_used_s: float | None


def describe(budget: Budget, about: About) -> None:
    """Writes a model's description if what its folder says is anything else: it may have been pruned away, be
    torn, or be by a name that the model had before. Raises OSError; without room for it there is none."""
    if _about(budget.root / about.fingerprint) == about:
        return
    text = msgspec.json.format(msgspec.json.encode(about)) + b"\n"
    temp = budget.create(about.fingerprint, len(text)).temp
    if temp is None:
        return
    try:
        while text:
            text = text[os.write(temp.descriptor, text) :]
        budget.publish(temp, ABOUT_FILE, replace=True)
    except IsADirectoryError:
        # Somebody's own; the records are as good without.
        budget.discard(temp)
    except OSError:
        budget.discard(temp)
        raise
    finally:
        os.close(temp.descriptor)


def clean(root: Path, max_bytes: int) -> Cleaned:
    """Makes the folder right before anybody serves from it: files of dead writers and records of a spelling
    that nobody reads go, the rest is brought down to `max_bytes`, and the ledger is counted anew.

    Records of other spellings go because nothing else would ever delete them or count them; what doesn't call
    itself a record is somebody's own and stays. A root that isn't there stays so. Raises OSError.
    """
    if not root.is_dir():
        return Cleaned(0, 0, 0, 0, 0)
    with Budget(root, max_bytes).locked() as ledger:
        listing = reconcile(ledger, root)
        foreign = sum(_unlinked(path) for path in listing.foreign)
        evicted = _shrink(ledger, listing, ledger.used - max_bytes)
        _drop_empty(ledger, root, listing, evicted)
        left = len(listing.records) - len(evicted)
        return Cleaned(
            unfinished=len(listing.reaped),
            foreign=foreign,
            evicted=len(evicted),
            entries=left,
            bytes=sum(stored.bytes for stored in listing.records) - sum(stored.bytes for stored in evicted),
        )


def scan(root: Path) -> list[FolderUse]:
    """What each model has on disk, last used first, [] where there is no root. Raises OSError."""
    uses = []
    for folder in model_folders(root):
        records = _records(root, folder)
        uses.append(
            FolderUse(
                fingerprint=folder,
                model=_model(root / folder),
                entries=len(records),
                bytes=sum(stored.bytes for stored in records),
                last_used_s=max((stored.used_s for stored in records), default=None),
            )
        )
    return sorted(uses, key=lambda use: use.last_used_s or 0.0, reverse=True)


def prune(root: Path, *, to_bytes: int | None = None, model: str | None = None) -> Pruned:
    """Deletes records: of one model or of all, the least recently used first, until what those models have
    takes at most `to_bytes` (None: all of it). Files being written stay. Raises OSError."""
    if not root.is_dir():
        return Pruned(0, 0, 0, 0)
    with Budget(root, 0).locked() as ledger:
        listing = reconcile(ledger, root)
        chosen = {folder for folder in listing.folders if model is None or _model(root / folder) == model}
        records = [stored for stored in listing.records if stored.folder in chosen]
        held = sum(stored.bytes for stored in records)
        gone = evict(ledger, victims(records, held - (to_bytes or 0)))
        _drop_empty(ledger, root, listing, gone)
        left = {stored.path for stored in records} - {stored.path for stored in gone}
        freed = sum(stored.bytes for stored in gone)
        return Pruned(len(gone), freed, len(left), held - freed)


def paths(root: Path) -> Iterator[tuple[str, Path]]:
    """Every record there is, as fingerprint and file: what record_file.verify takes. Raises OSError."""
    for folder in model_folders(root):
        for stored in _records(root, folder):
            yield folder, Path(stored.path)


def _records(root: Path, folder: str) -> list[Stored]:
    """What can be listed of one model, nothing where its folder is bad. Raises OSError for what may pass."""
    try:
        return records_in(root, folder)
    except OSError as problem:
        if verdict_on(problem) == "forget":
            raise
        return []


def _shrink(ledger: Ledger, listing: Listing, over_bytes: int) -> list[Stored]:
    return evict(ledger, victims(listing.records, over_bytes)) if over_bytes > 0 else []


def _drop_empty(ledger: Ledger, root: Path, listing: Listing, gone: list[Stored]) -> None:
    """Takes away the folders that hold no record any more, and no file being written."""
    deleted = {stored.path for stored in gone}
    busy = {stored.folder for stored in listing.records if stored.path not in deleted}
    busy |= {Path(temp.path).parent.name for temp in listing.unfinished}
    for folder in listing.folders:
        if folder in busy:
            continue
        if _unlinked(str(root / folder / ABOUT_FILE)):
            ledger.put(ledger.used - listing.about_bytes.get(folder, 0))
        with contextlib.suppress(OSError):
            os.rmdir(root / folder)


def _unlinked(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _model(folder: Path) -> str:
    """The model that a folder says it belongs to. Raises OSError for what may pass."""
    about = _about(folder)
    return "" if about is None else about.model


def _about(folder: Path) -> About | None:
    """None where it says nothing. Raises OSError for what may pass: it may well say whose it is."""
    try:
        with open_regular(folder / ABOUT_FILE) as file:
            return msgspec.json.decode(file.read(_MAX_ABOUT_BYTES), type=About)
    except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    except OSError as problem:
        if verdict_on(problem) == "forget":
            raise
        return None
