"""The header of a GGUF file, read as what a stranger wrote: every count, length and offset is checked before
it is believed, so that a damaged file is one line that says where.

A file is `GGUF`, a version, two counts, the metadata (key, type, value), the tensors (name, shape, format,
offset) and then, aligned, the tensors' bytes. Vocabularies make the metadata long: whoever only looks at the
file leaves long lists out.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from mlxpool.shared.files import open_regular
from mlxpool.shared.text import cut

from .formats import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Far beyond any model's; a count that is higher is a damaged one.
MAX_ENTRIES = 65_536
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 1_024
MAX_TEXT_BYTES = 16 * 2**20
MAX_LIST = 2 * 2**20
# Of the largest vocabularies it is 10; each byte of it may be work of the server, which serves meanwhile.
MAX_HEADER_BYTES = 64 * 2**20
MAX_DIMENSIONS = 4
MAX_ALIGNMENT_BYTES = 2**20
DEFAULT_ALIGNMENT_BYTES = 32
# Lists that are longer are vocabularies.
LONG_LIST = 4_096

_BOOL, _TEXT, _LIST = 7, 8, 9
# Type numbers of metadata: struct's letter, which is array's too where a list can have it.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = "general.alignment"


class GgufError(ValueError):
    """The file can't be imported; one line for a person that names what is wrong or unknown."""


class LongList(msgspec.Struct, frozen=True):
    """A list that was left out."""

    length: int


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor. shape: outermost first, as numpy has it. format: of FORMATS. offset: in bytes of the file."""

    name: str
    shape: tuple[int, ...]
    format: int
    path: Path
    offset: int
    size_bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def format_name(self) -> str:
        return FORMATS[self.format].name


class Header(msgspec.Struct, frozen=True):
    """metadata: text, numbers, truth, or lists of one of them. tensors: by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read(path: Path, *, with_long_lists: bool) -> Header:
    """The header of one file. Raises GgufError.

    with_long_lists: False leaves a LongList in place of each list of more than LONG_LIST values.
    """
    try:
        with open_regular(path) as file:
            return _Reader(path, file, with_long_lists).read()
    except OSError as problem:
        raise GgufError(f"{path.name} can't be read: {problem.strerror}") from None


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, with_long_lists: bool) -> None:
        self._path = path
        self._file = file
        self._with_long_lists = with_long_lists
        self._file_bytes = os.fstat(file.fileno()).st_size
        self._left = self._file_bytes

    def read(self) -> Header:
        magic = self._take(min(4, self._left), "its first bytes")
        if magic != MAGIC:
            raise GgufError(
                f"{self._path.name} can't be read as a GGUF: it begins with {magic!r}, not {MAGIC!r}"
            )
        version = self._number("I", "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "is for big-endian machines" if swapped else f"has version {version}"
            raise GgufError(f"{self._path.name} {why}; known are versions {VERSIONS[0]} and {VERSIONS[1]}")
        tensors = self._count("number of tensors", MAX_TENSORS)
        entries = self._count("number of metadata entries", MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._text("a metadata key", MAX_NAME_BYTES)
            if key in metadata:
                raise self._damaged(f"{cut(key)} is there twice")
            metadata[key] = self._value(self._number("I", f"type of {key}"), key)
        described = [self._tensor() for _ in range(tensors)]
        return Header(self._path, metadata, self._placed(described, metadata))

    def _damaged(self, what: str) -> GgufError:
        return GgufError(f"{self._path.name} is damaged: {what}")

    def _take(self, size: int, what: str) -> bytes:
        if size > self._left:
            raise self._damaged(f"it ends within {cut(what)} ({self._file_bytes} bytes in all)")
        taken = self._file.read(size)
        self._left -= size
        if self._file_bytes - self._left > MAX_HEADER_BYTES:
            raise self._damaged(f"its header is longer than {MAX_HEADER_BYTES} bytes, which is not believed")
        if len(taken) != size:
            raise self._damaged("it became shorter while it was read")
        return taken

    def _number(self, letter: str, what: str) -> Any:
        packing = struct.Struct(f"<{letter}")
        return packing.unpack(self._take(packing.size, what))[0]

    def _count(self, what: str, most: int) -> int:
        count: int = self._number("Q", what)
        if count > most:
            raise self._damaged(f"its {cut(what)} is {count}, and {most} is the most that is believed")
        return count

    def _text(self, what: str, most: int = MAX_TEXT_BYTES) -> str:
        raw = self._take(self._count(f"length of {what}", most), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._damaged(f"{cut(what)} is no UTF-8: {raw[:20]!r}") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == _TEXT:
            return self._text(key)
        if kind == _LIST:
            return self._list(key)
        if kind not in _NUMBERS:
            raise self._damaged(f"{cut(key)} has the unknown type {kind}")
        value = self._number(_NUMBERS[kind], key)
        return value != 0 if kind == _BOOL else value

    def _list(self, key: str) -> Any:
        kind = self._number("I", f"type of {key}'s values")
        length = self._count(f"length of {key}", MAX_LIST)
        is_kept = self._with_long_lists or length <= LONG_LIST
        if kind == _TEXT:
            texts = []
            for _ in range(length):
                text = self._text(key)
                if is_kept:
                    texts.append(text)
            return texts if is_kept else LongList(length)
        if kind not in _NUMBERS:
            raise self._damaged(f"{cut(key)} is a list of the unknown type {kind}")
        raw = self._take(length * struct.calcsize(f"<{_NUMBERS[kind]}"), key)
        if not is_kept:
            return LongList(length)
        if kind == _BOOL:
            return [byte != 0 for byte in raw]
        return list(struct.unpack(f"<{length}{_NUMBERS[kind]}", raw))

    def _tensor(self) -> TensorInfo:
        name = self._text("a tensor's name", MAX_NAME_BYTES)
        dimensions = self._number("I", f"shape of {name}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {cut(name)} has {dimensions} dimensions")
        inner_first = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions, f"shape of {name}"))
        shape = tuple(reversed(inner_first))
        number = self._number("I", f"format of {name}")
        if number not in FORMATS:
            known = ", ".join(known.name for known in FORMATS.values())
            raise GgufError(
                f"tensor {cut(name)} has format {number}, which is unknown here; known are {known}"
            )
        stored = FORMATS[number]
        # Each dimension is below the file's size in bits, so no product of four is beyond what Python counts.
        if min(shape) < 1 or shape[-1] % stored.values or max(shape) > 8 * self._file_bytes:
            raise self._damaged(f"tensor {cut(name)} of {stored.name} can't have the shape {list(shape)}")
        size_bytes = math.prod(shape) // stored.values * stored.size_bytes
        return TensorInfo(name, shape, number, self._path, self._number("Q", f"place of {name}"), size_bytes)

    def _placed(self, described: list[TensorInfo], metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        """By name, offsets counted from the file's beginning; no two may share a byte."""
        alignment = metadata.get(_ALIGNMENT, DEFAULT_ALIGNMENT_BYTES)
        if (
            not isinstance(alignment, int)
            or not 0 < alignment <= MAX_ALIGNMENT_BYTES
            or alignment & (alignment - 1)
        ):
            raise self._damaged(f"{_ALIGNMENT} is {cut(repr(alignment))}, and no power of two")
        begin = -(-(self._file_bytes - self._left) // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        end, before = begin, ""
        for tensor in sorted(described, key=lambda tensor: tensor.offset):
            if tensor.name in placed:
                raise self._damaged(f"tensor {cut(tensor.name)} is there twice")
            offset = begin + tensor.offset
            if tensor.offset % alignment:
                raise self._damaged(
                    f"tensor {cut(tensor.name)} lies at {offset}, off the grid of {alignment}"
                )
            if offset < end:
                raise self._damaged(f"tensors {cut(before)} and {cut(tensor.name)} overlap")
            end, before = offset + tensor.size_bytes, tensor.name
            if end > self._file_bytes:
                raise self._damaged(
                    f"tensor {cut(tensor.name)} ends at byte {end}, the file at {self._file_bytes};"
                    " was it fetched whole?"
                )
            placed[tensor.name] = msgspec.structs.replace(tensor, offset=offset)
        return placed
