"""A plan's tensors into `model*.safetensors`, as a stream: no tensor is ever in memory whole.

Names, shapes and types are known before the first number is read, so a file's header is written first. The
three tensors of a quantised one come out of one pass over its rows; each has its place in the file, so they
are written side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from mlxpool.shared.checkpoint import INDEX_FILE
from mlxpool.shared.files import open_regular
from mlxpool.shared.gguf.formats import AFFINE_GROUP
from mlxpool.shared.gguf.plan import ELEMENT_BYTES, Dtype, Piece, Plan

from . import values

# As mlx-lm cuts a model: a file that every file system and uploader takes.
SHARD_BYTES = 5 * 2**30
_HEADER_GRID_BYTES = 8
_NAMES: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "native": "F16"}

# Called with bytes written and bytes in all.
Progress = Callable[[int, int], None]


class _Stored(NamedTuple):
    """A tensor of the file: its name, type, shape, and bytes."""

    name: str
    dtype: str
    shape: list[int]
    size_bytes: int


def write(plan: Plan, folder: Path, progress: Progress) -> None:
    """Every weight of the plan into `folder`, with an index where it takes several files.

    Raises GgufError where a value does not fit, OSError.
    """
    shards = _shards(plan.pieces)
    done, total = 0, plan.weights_bytes
    progress(0, total)

    def wrote(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        progress(done, total)

    places: dict[str, str] = {}
    with ExitStack() as stack:
        paths = {piece.source.path for piece in plan.pieces}
        sources = {path: stack.enter_context(open_regular(path)) for path in sorted(paths)}
        for number, shard in enumerate(shards, 1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            stored = [_stored(piece, plan.dtype) for piece in shard]
            with (folder / name).open("wb") as file:
                _write_shard(file, shard, stored, plan.dtype, sources, wrote)
            places |= {each.name: name for tensors in stored for each in tensors}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")


def _shards(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces in order, cut where a file would pass SHARD_BYTES."""
    shards: list[list[Piece]] = [[]]
    size_bytes = 0
    for piece in pieces:
        if shards[-1] and size_bytes + piece.size_bytes > SHARD_BYTES:
            shards.append([])
            size_bytes = 0
        shards[-1].append(piece)
        size_bytes += piece.size_bytes
    return shards


def _stored(piece: Piece, dtype: Dtype) -> list[_Stored]:
    """What a piece is in the file: one tensor, or three where it stays quantised."""
    shape = list(piece.source.shape)
    if not piece.bits:
        return [_Stored(piece.parameter, _NAMES[dtype], shape, piece.size_bytes)]
    module = piece.parameter.removesuffix(".weight")
    rows, width = shape
    words, groups = width * piece.bits // 32, width // AFFINE_GROUP
    half = ELEMENT_BYTES["native"]
    return [
        _Stored(piece.parameter, "U32", [rows, words], rows * words * 4),
        _Stored(f"{module}.scales", "F16", [rows, groups], rows * groups * half),
        _Stored(f"{module}.biases", "F16", [rows, groups], rows * groups * half),
    ]


def _write_shard(
    file: BinaryIO,
    pieces: Sequence[Piece],
    stored: Sequence[Sequence[_Stored]],
    dtype: Dtype,
    sources: dict[Path, BinaryIO],
    wrote: Callable[[int], None],
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for tensor in (each for tensors in stored for each in tensors):
        end = offset + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _HEADER_GRID_BYTES)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    # From here on each tensor is written at its own place.
    file.flush()
    place = file.tell()
    for piece, tensors in zip(pieces, stored, strict=True):
        source = sources[piece.source.path]
        if not piece.bits:
            for data in values.plain(source, piece, dtype):
                _write_at(file, data, place)
                place += len(data)
                wrote(len(data))
            continue
        places = [place]
        for tensor in tensors:
            places.append(places[-1] + tensor.size_bytes)
        place = places.pop()
        for parts in values.quantised(source, piece):
            for at, data in enumerate(parts):
                _write_at(file, data, places[at])
                places[at] += len(data)
                wrote(len(data))


def _write_at(file: BinaryIO, data: bytes, place: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file.fileno(), view, place)
        view, place = view[written:], place + written
