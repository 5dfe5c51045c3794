"""A tensor's numbers, some rows at a time, as the folder's file will hold them.

Rows are stored in whole blocks, so each is read, dequantised and written alone: memory is bounded by
ROWS_BYTES, whatever the tensor's size. Quantised formats that MLX computes with are only rearranged, never
computed: their packed bits, scales and offsets mean exactly the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from mlxpool.shared.gguf.formats import AFFINE_GROUP, FORMATS
from mlxpool.shared.gguf.header import GgufError, TensorInfo
from mlxpool.shared.gguf.plan import Dtype, Piece

# Of float32 numbers at once; dequantising has some copies of it.
ROWS_BYTES = 16 * 2**20

Array = np.ndarray[Any, np.dtype[Any]]

_Q4_0, _Q4_1, _Q8_0 = 2, 3, 8
# What unsigned numbers are more than the file's signed ones.
_Q4_MIDDLE, _Q8_MIDDLE = 8, 128


def plain(file: BinaryIO, piece: Piece, dtype: Dtype) -> Iterator[bytes]:
    """The tensor's numbers in order, little-endian. Raises GgufError, OSError."""
    for rows in _stored_rows(file, piece.source):
        numbers = dequantize(rows, GGMLQuantizationType(piece.source.format)).astype(np.float32, copy=False)
        if piece.change == "minus_one":
            numbers = numbers - np.float32(1)
        if dtype == "float32":
            yield numbers.astype("<f4", copy=False).tobytes()
        elif dtype == "bfloat16":
            yield _bfloat16(numbers).tobytes()
        else:
            yield _float16(numbers, piece.source.name).tobytes()


def quantised(file: BinaryIO, piece: Piece) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Packed words, scales and offsets of some rows after the other. Raises GgufError, OSError."""
    for rows in _stored_rows(file, piece.source):
        blocks = rows.reshape(-1, FORMATS[piece.source.format].size_bytes)
        scales = blocks[:, :2].copy().view("<f2")
        if piece.source.format == _Q8_0:
            words = blocks[:, 2:] ^ np.uint8(_Q8_MIDDLE)
            offsets = scales.astype(np.float32) * -_Q8_MIDDLE
        else:
            first = 4 if piece.source.format == _Q4_1 else 2
            words = _neighbours(blocks[:, first:])
            if piece.source.format == _Q4_1:
                offsets = blocks[:, 2:4].copy().view("<f2").astype(np.float32)
            else:
                offsets = scales.astype(np.float32) * -_Q4_MIDDLE
        yield words.tobytes(), scales.tobytes(), _float16(offsets, piece.source.name).tobytes()


def _stored_rows(file: BinaryIO, tensor: TensorInfo) -> Iterator[Array]:
    """Bytes [rows, bytes of a row], all rows after each other."""
    width = tensor.shape[-1]
    rows = tensor.elements // width
    row_bytes = tensor.size_bytes // rows
    at_once = max(1, ROWS_BYTES // (4 * width))
    for begin in range(0, rows, at_once):
        count = min(at_once, rows - begin)
        raw = os.pread(file.fileno(), count * row_bytes, tensor.offset + begin * row_bytes)
        if len(raw) != count * row_bytes:
            raise GgufError(f"{tensor.path.name} became shorter while it was read")
        yield np.frombuffer(raw, np.uint8).reshape(count, row_bytes)


def _neighbours(nibbles: Array) -> Array:
    """GGUF's 16 bytes of a group hold numbers i and i + 16; MLX's hold 2 i and 2 i + 1."""
    numbers: Array = np.concatenate([nibbles & 15, nibbles >> 4], axis=1)
    assert numbers.shape[1] == AFFINE_GROUP
    packed: Array = numbers[:, 0::2] | (numbers[:, 1::2] << 4)
    return packed


def _bfloat16(numbers: Array) -> Array:
    """Rounded to the nearest, ties to even, as their upper 16 bits. What is no number stays none."""
    bits = np.ascontiguousarray(numbers, "<f4").view("<u4")
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    nothing = np.isnan(numbers)
    if nothing.any():
        rounded[nothing] = 0x7FC0
    return rounded


def _float16(numbers: Array, name: str) -> Array:
    """Raises GgufError where a number is beyond it."""
    with np.errstate(over="ignore"):
        narrow = numbers.astype("<f2")
    if np.isinf(narrow).any() and not np.isinf(numbers).any():
        raise GgufError(f"tensor {name} holds numbers beyond float16's; take bfloat16")
    return narrow
