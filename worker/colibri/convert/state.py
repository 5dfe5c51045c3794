"""What of a conversion is done, on the disk, so that one that was killed goes on where it was.

A file is written under another name, made durable and renamed; then progress.json, replaced in the same way,
takes up its size and hashes. So whatever it lists is whole, and a file that it does not list is written
again. It also says with which parameters and of which source it was begun: parts of two kinds never meet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec
import xxhash

from mlxpool.shared.colibri.records import (
    DENSE_PATTERN,
    EXPERTS_FOLDER,
    PROGRESS_FILE,
    Recipe,
    RecordLayer,
    SourceFile,
    WrittenFile,
)
from mlxpool.shared.files import PART_SUFFIX, write_whole

from .terms import ConvertError

VERSION = 1
READ_BYTES = 8 << 20


class Stamp(msgspec.Struct, frozen=True):
    """A file of the source. modified_ns: when it was written last."""

    file: SourceFile
    modified_ns: int


class Progress(msgspec.Struct, frozen=True):
    """progress.json."""

    version: int
    source: str
    recipe: Recipe
    stamps: tuple[Stamp, ...]
    layers: tuple[RecordLayer, ...] = ()
    dense: tuple[WrittenFile, ...] = ()

    @property
    def layers_by_file(self) -> dict[str, RecordLayer]:
        return {layer.file: layer for layer in self.layers}

    @property
    def dense_by_name(self) -> dict[str, WrittenFile]:
        return {file.name: file for file in self.dense}


def begin(source: Path, files: tuple[SourceFile, ...], recipe: Recipe) -> Progress:
    """Nothing done. Raises OSError."""
    stamps = tuple(Stamp(file, os.stat(source / file.name).st_mtime_ns) for file in files)
    return Progress(VERSION, str(source), recipe, stamps)


def resume(stage: Path, fresh: Progress) -> Progress:
    """What an earlier run has done here, `fresh` where there was none. Raises ConvertError where it was begun
    with something else."""
    try:
        found = msgspec.json.decode((stage / PROGRESS_FILE).read_bytes(), type=Progress)
    except FileNotFoundError:
        if stage.is_dir() and any(path.suffix != PART_SUFFIX for path in stage.iterdir()):
            raise ConvertError(f"{stage} was begun by something else; remove it first") from None
        return fresh
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        raise ConvertError(f"{stage / PROGRESS_FILE} can't be read ({problem}); remove {stage}") from None
    remove = f"or remove {stage} to begin again"
    if found.version != VERSION:
        raise ConvertError(
            f"the conversion in {stage} was begun by another version; remove it to begin again"
        )
    if found.recipe != fresh.recipe:
        raise ConvertError(
            f"the conversion was begun with {told(found.recipe)}, this is {told(fresh.recipe)}; go on with "
            f"what it was begun with, {remove}"
        )
    if found.source != fresh.source:
        raise ConvertError(
            f"the conversion was begun from {found.source}, not {fresh.source}; give that, {remove}"
        )
    changed = _changed(found.stamps, fresh.stamps)
    if changed is not None:
        raise ConvertError(
            f"{changed} of the source has changed since the conversion was begun; remove {stage}"
        )
    return found


def told(recipe: Recipe) -> str:
    """A recipe for a person."""
    if recipe.bits is None:
        return "weights as they are"
    return f"{recipe.bits} bits in groups of {recipe.group_size} ({recipe.mode})"


def _changed(was: tuple[Stamp, ...], now: tuple[Stamp, ...]) -> str | None:
    before, after = ({stamp.file.name: stamp for stamp in stamps} for stamps in (was, now))
    return next((name for name in sorted({*before, *after}) if before.get(name) != after.get(name)), None)


def save(stage: Path, progress: Progress) -> None:
    """Replace progress.json. Raises OSError."""
    write_whole(stage / PROGRESS_FILE, lambda file: file.write(msgspec.json.encode(progress)))


def drop_others(stage: Path, due: Collection[str]) -> None:
    """Delete weights that are none of `due`, and what was being written when a run ended."""
    for path in [*stage.glob("*"), *stage.glob(f"{EXPERTS_FOLDER}/*")]:
        is_weights = path.parent.name == EXPERTS_FOLDER or path.match(DENSE_PATTERN)
        if path.suffix == PART_SUFFIX or (is_weights and str(path.relative_to(stage)) not in due):
            path.unlink(missing_ok=True)


def hash_of(path: Path, progress: Callable[[int], None]) -> str:
    """Of a whole file. progress: bytes read since the last word. Raises OSError."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            progress(len(data))
    return digest.hexdigest()
