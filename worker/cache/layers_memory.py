"""Arrays that somebody else fills or reads: their types as files name them, their memory for other threads.

The disk tier reads files straight into arrays and writes them out of them. The engine thread makes the arrays
and takes their aliases; the other threads work on aliases and make no mx call. The edge that shaped it: numpy
knows no bfloat16, so such an array is aliased as uint16, through a view that shares its memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.cache.layers_kinds import Unfit

_DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "F64": mx.float64,
    "C64": mx.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_name(dtype: mx.Dtype) -> str:
    """What safetensors calls the type. Raises Unfit."""
    name = _NAMES.get(dtype)
    if name is None:
        raise Unfit(f"arrays of {dtype} have no name in a file")
    return name


def dtype_of(name: str) -> mx.Dtype:
    """The type that safetensors calls so. Raises Unfit."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise Unfit(f"{name} is no type of arrays")
    return dtype


def empty(dtype: mx.Dtype, shape: Sequence[int]) -> mx.array:
    """An evaluated array with memory of its own, to be filled through its alias."""
    made = mx.zeros(tuple(shape), dtype)
    mx.eval(made)
    return made


def alias(array: mx.array) -> np.ndarray[Any, Any]:
    """The memory of an evaluated array, writable; bfloat16 comes as uint16. The array sees what is written,
    and so does each that shares its memory. The memory lives as long as the alias."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def of_their_own(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Copies of views whose memory lies apart, each in one piece."""
    made = {name: mx.contiguous(array) for name, array in arrays.items()}
    mx.eval(list(made.values()))
    return made
