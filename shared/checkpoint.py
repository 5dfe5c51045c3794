"""What a model folder says about itself, without reading a tensor.

A safetensors file begins with a length and a JSON table of its tensors: type, shape and byte range. So
names, sizes and most faults of a download (a missing shard, a file cut short) are known from a few
kilobytes per file, and a broken folder is refused before a worker is started for it. The files are those
mlx-lm loads, `model*.safetensors`; an index file is believed only where it agrees with them.

Nothing here is kept or changed: `read` and `stamp` look at the folder and return values.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared.files import open_regular
from mlxpool.shared.units import format_count

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_PATTERN = "model*.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")

# The safetensors format's own limit on a header.
MAX_HEADER_BYTES = 100_000_000
# A config is a few kilobytes; the largest index seen (60,000 tensors) is under 6 MB.
MAX_JSON_BYTES = 64 * 1024 * 1024
_LENGTH_BYTES = 8

# Bits of one element, by the format's names.
DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


class CheckpointError(Exception):
    """The folder holds no model that can be loaded. One line that names the file and what is wrong."""


class CutShort(CheckpointError):
    """A file ends before its tensors do. tensor: the first that is not whole, with its shape and the size
    that it should have. missing: of its bytes."""

    def __init__(
        self, message: str, tensor: str, shape: tuple[int, ...], size_bytes: int, missing: int
    ) -> None:
        super().__init__(message)
        self.tensor, self.shape, self.size_bytes, self.missing = tensor, shape, size_bytes, missing


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """One tensor as its file's header describes it. dtype: a key of DTYPE_BITS."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Header(msgspec.Struct, frozen=True):
    """What a safetensors file says of itself. offsets: of each tensor's first byte, from the file's start.

    metadata: its free text, by key.
    """

    tensors: dict[str, Tensor]
    offsets: dict[str, int]
    metadata: dict[str, str]


class Checkpoint(msgspec.Struct, frozen=True):
    """A model folder that looks whole.

    config: config.json, parsed. tensors: by name, over all files. files: names of the weight files.
    stamp: `stamp(folder)` as it was before reading.
    """

    folder: Path
    model_type: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: tuple[str, ...]
    weights_bytes: int
    stamp: str


class _Entry(msgspec.Struct, gc=False):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENTRY = msgspec.json.Decoder(_Entry)
_METADATA = msgspec.json.Decoder(dict[str, str])
_INDEX = msgspec.json.Decoder(_Index)
_OBJECT = msgspec.json.Decoder(dict[str, Any])
# What somebody else's JSON can come to, the last of text that is nested without end.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`. Raises CheckpointError."""
    identity = stamp(folder)
    config = read_config(folder / CONFIG_FILE)
    files = sorted(path.name for path in folder.glob(WEIGHTS_PATTERN) if path.is_file())
    index = read_index(folder / INDEX_FILE)
    for shard in sorted(set(index.values()) - set(files)):
        raise CheckpointError(f"{INDEX_FILE}: lists {shard!r}, which is not in the folder")
    if not files:
        raise CheckpointError(f"{called(folder)}: no {WEIGHTS_PATTERN} file in the folder")
    tensors: dict[str, Tensor] = {}
    home: dict[str, str] = {}
    for name in files:
        for tensor, described in read_header(folder / name).items():
            if tensor in tensors:
                raise CheckpointError(f"{name}: tensor {tensor!r} is in {home[tensor]} already")
            tensors[tensor] = described
            home[tensor] = name
    for tensor, shard in index.items():
        if home.get(tensor) != shard:
            raise CheckpointError(f"{INDEX_FILE}: lists tensor {tensor!r} in {shard}, which does not hold it")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(f"{called(folder)}: no tokenizer: none of {', '.join(TOKENIZER_FILES)}")
    return Checkpoint(
        folder=folder,
        model_type=config["model_type"],
        config=config,
        tensors=tensors,
        files=tuple(files),
        weights_bytes=sum(tensor.size_bytes for tensor in tensors.values()),
        stamp=identity,
    )


def called(folder: Path) -> str:
    """A folder's name in messages; the root and "." have none of their own."""
    return folder.name or str(folder.absolute())


def stamp(folder: Path) -> str:
    """A cheap identity of the folder's files: it changes when a name, a size or a time of writing does.

    Raises CheckpointError where the folder can't be listed.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        with os.scandir(folder) as entries:
            files = sorted((entry.name, entry.stat()) for entry in entries if entry.is_file())
    except OSError as problem:
        name = called(Path(problem.filename or folder))
        raise CheckpointError(f"{name}: can't be listed: {problem.strerror}") from None
    for name, status in files:
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, from its header alone. Raises CheckpointError."""
    return read_whole_header(path).tensors


def read_whole_header(path: Path) -> Header:
    """One safetensors file, from its header alone. Raises CheckpointError."""
    try:
        with open_regular(path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            data_bytes = file_bytes - _LENGTH_BYTES - header_bytes
            if file_bytes < _LENGTH_BYTES or data_bytes < 0 or header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path.name}: no safetensors file, or cut short within its header: {file_bytes} bytes"
                )
            header = file.read(header_bytes)
    except OSError as problem:
        raise CheckpointError(f"{path.name}: can't be read: {problem.strerror}") from None
    try:
        table = _HEADER.decode(header)
        said = table.pop("__metadata__", None)
        entries = {name: _ENTRY.decode(raw) for name, raw in table.items()}
    except UNREADABLE as problem:
        raise CheckpointError(f"{path.name}: its header is no safetensors header: {problem}") from None
    tensors = {name: _tensor(path.name, name, entry) for name, entry in entries.items()}
    _check_layout(path.name, entries, data_bytes)
    start = _LENGTH_BYTES + header_bytes
    offsets = {name: start + entry.data_offsets[0] for name, entry in entries.items()}
    return Header(tensors, offsets, _metadata(said))


def _metadata(said: msgspec.Raw | None) -> dict[str, str]:
    """Nothing depends on it where it is not as the format wants it: loaders do not look at it."""
    try:
        return {} if said is None else _METADATA.decode(said)
    except UNREADABLE:
        return {}


def _tensor(file: str, name: str, entry: _Entry) -> Tensor:
    bits = DTYPE_BITS.get(entry.dtype)
    if bits is None:
        raise CheckpointError(f"{file}: tensor {name!r} has the unknown type {entry.dtype!r}")
    begin, end = entry.data_offsets
    if min(entry.shape, default=0) < 0 or not 0 <= begin <= end:
        raise CheckpointError(
            f"{file}: tensor {name!r} has an impossible shape or range: {list(entry.shape)}, {begin} to {end}"
        )
    tensor = Tensor(entry.dtype, entry.shape, end - begin)
    if tensor.elements * bits != tensor.size_bytes * 8:
        raise CheckpointError(
            f"{file}: tensor {name!r} of {entry.dtype} {list(entry.shape)} can't be {tensor.size_bytes} bytes"
        )
    return tensor


def _check_layout(file: str, entries: dict[str, _Entry], data_bytes: int) -> None:
    """The tensors must cover the file's data exactly, in some order, without gap or overlap."""
    covered = 0
    in_order = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    for name, entry in in_order:
        begin, end = entry.data_offsets
        if begin != covered:
            raise CheckpointError(f"{file}: tensor {name!r} begins at {begin} where {covered} was due")
        covered = end
    if data_bytes > covered:
        raise CheckpointError(
            f"{file}: {format_count(data_bytes - covered, 'byte')} longer than its header says"
        )
    if data_bytes < covered:
        name, entry = next(item for item in in_order if item[1].data_offsets[1] > data_bytes)
        begin, end = entry.data_offsets
        raise CutShort(
            f"{file}: {format_count(covered - data_bytes, 'byte')} shorter than its header says",
            name,
            entry.shape,
            end - begin,
            end - max(begin, data_bytes),
        )


def read_config(path: Path) -> dict[str, Any]:
    """config.json, which names its model_type. Raises CheckpointError."""
    raw = read_small(path)
    if raw is None:
        raise CheckpointError(f"{called(path.parent)}: no {path.name} in the folder")
    try:
        config = _OBJECT.decode(raw)
    except UNREADABLE as problem:
        raise CheckpointError(f"{path.name}: no JSON object: {problem}") from None
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise CheckpointError(f"{path.name}: has no model_type: which architecture it is can't be known")
    return config


def read_index(path: Path) -> dict[str, str]:
    """Tensor → shard of an index file, {} where there is none. Raises CheckpointError."""
    raw = read_small(path)
    if raw is None:
        return {}
    try:
        return _INDEX.decode(raw).weight_map
    except UNREADABLE as problem:
        raise CheckpointError(f"{path.name}: no safetensors index: {problem}") from None


def read_small(path: Path) -> bytes | None:
    """The bytes of a JSON file, None where there is no such file. Raises CheckpointError."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise CheckpointError(f"{path.name}: can't be read: {problem.strerror}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path.name}: larger than {MAX_JSON_BYTES} bytes")
    return raw
