"""Experts as `mlxpool colibri convert` writes them: one file per layer, one record per expert.

A record holds an expert's parts one after the other, so that one read fetches all of them; it begins at a
multiple of ALIGN_BYTES, so that the read may pass the page cache. experts.json says what lies where. Its
sizes are checked against each other and against the files: an interrupted copy of the folder is noticed
before anything is read. The hashes are for `--verify`; loading does not read what they cover.
"""

from __future__ import annotations

import math
import os
import re
import stat
from pathlib import Path

import msgspec

from mlxpool.shared import checkpoint
from mlxpool.shared.checkpoint import DTYPE_BITS, UNREADABLE, CheckpointError
from mlxpool.shared.colibri import folder as folders
from mlxpool.shared.colibri.layout import (
    ALIGN_BYTES,
    ExpertLayout,
    Part,
    PartName,
    Piece,
    Projection,
    Quantised,
    Strided,
)
from mlxpool.shared.text import cut

INDEX_FILE = folders.RECORDS_INDEX
EXPERTS_FOLDER = folders.RECORDS_FOLDER
DENSE_PATTERN = folders.RECORDS_DENSE
PROGRESS_FILE = folders.RECORDS_PROGRESS
FORMAT = "mlxpool-experts"
VERSION = 1

# What is written here and no more: of a stranger's index no name leads out of its folder or to anything else.
_LAYER_FILE = re.compile(rf"{EXPERTS_FOLDER}/[A-Za-z0-9_-][A-Za-z0-9._-]*")
_DENSE_FILE = re.compile(r"dense-[A-Za-z0-9._-]+\.safetensors")


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a record. dtype, shape: of one expert's, in safetensors' names. offset: in the record."""

    projection: Projection
    part: PartName
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class RecordLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The experts of one layer. module: as ExpertLayout's. file: its path in the folder. record_bytes: of a
    record; stride_bytes: from one to the next. xxh3: of each expert's record, in hexadecimal digits."""

    layer: int
    module: str
    file: str
    experts: int
    record_bytes: int
    stride_bytes: int
    fields: tuple[Field, ...]
    packing: dict[Projection, Quantised]
    xxh3: tuple[str, ...]


class WrittenFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the dense part. xxh3: of its whole content."""

    name: str
    size_bytes: int
    xxh3: str


class SourceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that the records were made from. header_xxh3: of its safetensors header."""

    name: str
    size_bytes: int
    header_xxh3: str


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How matrices were packed. bits: None where they were left as they were."""

    bits: int | None
    group_size: int
    mode: str


class RecordIndex(msgspec.Struct, frozen=True):
    """experts.json. layers: in order, the draft layer last."""

    format: str
    version: int
    model_type: str
    layers: tuple[RecordLayer, ...]
    dense: tuple[WrittenFile, ...]
    source: tuple[SourceFile, ...]
    made_with: Recipe


class _Said(msgspec.Struct):
    format: str
    version: int


def record_stride(record_bytes: int) -> int:
    """From one record's beginning to the next one's."""
    return -(-record_bytes // ALIGN_BYTES) * ALIGN_BYTES


def encode(index: RecordIndex) -> bytes:
    """The content of experts.json."""
    return msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"


def read_index(folder: Path) -> RecordIndex:
    """experts.json, checked within itself and against the sizes of the files that it names. Raises
    CheckpointError."""
    raw = checkpoint.read_small(folder / INDEX_FILE)
    if raw is None:
        raise CheckpointError(f"{checkpoint.called(folder)}: no {INDEX_FILE} in the folder")
    try:
        said = msgspec.json.decode(raw, type=_Said)
        if said.format != FORMAT or said.version != VERSION:
            raise CheckpointError(
                f"{INDEX_FILE}: is of format {said.format!r}, version {said.version}; this mlxpool reads "
                f"{FORMAT!r}, version {VERSION}: convert the model again"
            )
        index = msgspec.json.decode(raw, type=RecordIndex)
    except UNREADABLE as problem:
        raise CheckpointError(f"{INDEX_FILE}: no index of experts: {problem}") from None
    seen: set[int] = set()
    of_file: dict[str, int] = {}
    for layer in index.layers:
        if layer.layer in seen:
            raise CheckpointError(f"{INDEX_FILE}: layer {layer.layer} is there twice")
        seen.add(layer.layer)
        _check(layer)
        first = of_file.setdefault(layer.file, layer.layer)
        if first != layer.layer:
            raise CheckpointError(
                f"{INDEX_FILE}: layers {first} and {layer.layer} are both in {layer.file}; each has its "
                "own file"
            )
        experts_end = layer.stride_bytes * (layer.experts - 1) + layer.record_bytes
        _check_size(folder, layer.file, experts_end, f"layer {layer.layer}", layer.stride_bytes)
    for file in index.dense:
        _check_name(file.name, _DENSE_FILE)
        size = _size(folder, file.name)
        if size != file.size_bytes:
            raise CheckpointError(f"{file.name}: has {size} bytes where {file.size_bytes} were written")
    return index


def _check(layer: RecordLayer) -> None:
    of = f"{INDEX_FILE}: layer {layer.layer}"
    _check_name(layer.file, _LAYER_FILE)
    if layer.layer < 0 or layer.experts < 1 or len(layer.xxh3) != layer.experts:
        raise CheckpointError(f"{of}: has {layer.experts} experts and {len(layer.xxh3)} hashes")
    end = 0
    parts: set[tuple[str, str]] = set()
    for field in layer.fields:
        name = f"{field.projection}.{field.part}"
        bits = DTYPE_BITS.get(field.dtype)
        if bits is None or min(field.shape, default=0) < 0:
            raise CheckpointError(f"{of}: {name} can't be of {field.dtype} {list(field.shape)}")
        if math.prod(field.shape) * bits != field.size_bytes * 8 or field.offset != end:
            raise CheckpointError(
                f"{of}: {name} of {field.size_bytes} bytes at {field.offset} is out of place"
            )
        if (field.projection, field.part) in parts:
            raise CheckpointError(f"{of}: {name} is there twice")
        parts.add((field.projection, field.part))
        end += field.size_bytes
    if not end or end != layer.record_bytes or layer.stride_bytes != record_stride(end):
        raise CheckpointError(
            f"{of}: records of {layer.record_bytes} bytes, {layer.stride_bytes} apart, "
            f"hold {end} bytes of parts"
        )
    for projection in {field.projection for field in layer.fields}:
        if (projection, "weight") not in parts or projection not in layer.packing:
            raise CheckpointError(f"{of}: how {projection} is packed is not said, or it has no weight")


def _check_name(name: str, allowed: re.Pattern[str]) -> None:
    if not allowed.fullmatch(name):
        raise CheckpointError(f"{INDEX_FILE}: {cut(name)!r} is no file of this folder")


def _check_size(folder: Path, name: str, needed: int, holds: str, stride: int) -> None:
    size = _size(folder, name)
    if size < needed:
        raise CheckpointError(
            f"{name}: {needed - size} bytes short: {holds}, expert {size // stride} is not whole"
        )


def _size(folder: Path, name: str) -> int:
    try:
        status = os.stat(folder / name)
    except OSError as problem:
        raise CheckpointError(f"{name}: can't be read: {problem.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{name}: is no regular file")
    return status.st_size


def layout(layer: RecordLayer) -> ExpertLayout:
    """The layer as the runtime knows it."""
    pieces, parts = [], []
    for field in layer.fields:
        name = f"{field.projection}.{field.part}"
        places = Strided(layer.file, field.offset, layer.stride_bytes)
        pieces.append(Piece(name, field.dtype, field.shape, field.size_bytes, places))
        parts.append(
            Part(field.projection, field.part, field.dtype, field.shape, field.size_bytes, piece=name)
        )
    return ExpertLayout(layer.layer, layer.module, layer.experts, tuple(pieces), tuple(parts), layer.packing)
