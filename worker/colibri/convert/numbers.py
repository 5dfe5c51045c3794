"""One expert's numbers on their way into a record.

What MLX has packed is taken byte for byte. Other matrices are packed one by one by `mx.quantize`, which gives
the bytes that packing all of a layer's experts in one tensor does. fp8 becomes bfloat16 first, in mlx-lm's
order of rounding.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.shared.colibri.layout import PROJECTIONS, PartName, Place, Projection, Quantised
from mlxpool.shared.colibri.records import Recipe

from .source import BLOCK, Experts, Key
from .terms import ConvertError

Bytes = npt.NDArray[np.uint8]
# As they are in a file, with what the file says of them.
Raw = dict[tuple[Projection, Key], tuple[Bytes, Place]]

PARTS: tuple[PartName, ...] = ("weight", "scales", "biases", "bias")
DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16,
    "U8": mx.uint8, "U32": mx.uint32, "F8_E4M3": mx.uint8,
    "I32": mx.int32, "I64": mx.int64, "U16": mx.uint16, "I16": mx.int16, "I8": mx.int8, "BOOL": mx.bool_,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "F8_E4M3"}


class Shaped(NamedTuple):
    """A part of a record. dtype: as safetensors names it."""

    projection: Projection
    part: PartName
    dtype: str
    shape: tuple[int, ...]


def read(files: Mapping[str, int], experts: Experts, expert: int) -> Raw:
    """One expert from open files. Raises ConvertError where a file gives less than its header says."""
    raw: Raw = {}
    for (projection, key), places in experts.places.items():
        place = places[expert]
        try:
            raw[projection, key] = read_place(files[place.file], place), place
        except OSError as problem:
            why = problem.strerror or str(problem)
            told = f"layer {experts.layer}, expert {expert} could not be read from {place.file}: {why}"
            raise ConvertError(told) from None
    return raw


def read_place(descriptor: int, place: Place) -> Bytes:
    """A tensor's bytes. Raises OSError."""
    data = np.empty(place.size_bytes, np.uint8)
    view, done = data.data, 0
    while done < place.size_bytes:
        got = os.preadv(descriptor, [view[done:]], place.offset + done)
        if not got:
            raise OSError(f"the file ends after {place.offset + done} bytes")
        done += got
    return data


def shapes(experts: Experts, recipe: Recipe) -> list[Shaped]:
    """What a record of these experts consists of, in order. Raises ConvertError where the recipe does not
    fit."""
    found: list[Shaped] = []
    for projection in PROJECTIONS:
        if experts.kind == "mlx":
            for part in PARTS:
                places = experts.places.get((projection, _KEY_OF[part]))
                if places is not None:
                    found.append(Shaped(projection, part, places[0].dtype, places[0].shape))
            continue
        dtype = experts.places[projection, "weight"][0].dtype if experts.kind == "float" else "BF16"
        rows, width = experts.shape(projection)
        found += _packed_shapes(experts.layer, projection, dtype, rows, width, recipe)
        bias = experts.places.get((projection, "bias"))
        if bias is not None:
            found.append(Shaped(projection, "bias", bias[0].dtype, bias[0].shape))
    return found


_KEY_OF: dict[PartName, Key] = {"weight": "weight", "scales": "scales", "biases": "biases", "bias": "bias"}


def _packed_shapes(
    layer: int, projection: Projection, dtype: str, rows: int, width: int, recipe: Recipe
) -> list[Shaped]:
    if recipe.bits is None:
        return [Shaped(projection, "weight", dtype, (rows, width))]
    if width % recipe.group_size:
        raise ConvertError(
            f"layer {layer}: {projection} is {width} wide, which groups of {recipe.group_size} do not "
            "divide; give another --group-size"
        )
    groups = (rows, width // recipe.group_size)
    weight = Shaped(projection, "weight", "U32", (rows, width * recipe.bits // 32))
    if recipe.mode == "affine":
        return [
            weight,
            Shaped(projection, "scales", dtype, groups),
            Shaped(projection, "biases", dtype, groups),
        ]
    return [weight, Shaped(projection, "scales", "U8", groups)]


def packing(experts: Experts, recipe: Recipe, said: Mapping[str, Any]) -> dict[Projection, Quantised]:
    """How each projection is packed. said: of experts that MLX has packed, config.json's quantization."""
    if experts.kind != "mlx":
        if recipe.bits is None:
            return {
                projection: Quantised("float", _float_bits(experts, projection)) for projection in PROJECTIONS
            }
        scheme = Quantised(recipe.mode, recipe.bits, recipe.group_size)  # type: ignore[arg-type]
        return dict.fromkeys(PROJECTIONS, scheme)
    found: dict[Projection, Quantised] = {}
    for projection in PROJECTIONS:
        own = said.get(f"{experts.module}.{projection}")
        one = own if isinstance(own, dict) else said
        try:
            found[projection] = Quantised(one.get("mode", "affine"), one["bits"], one["group_size"])
        except (KeyError, TypeError):
            raise ConvertError(
                f"config.json does not say how {experts.module}.{projection} is packed: bits and group_size "
                "of its `quantization` are due"
            ) from None
    return found


def _float_bits(experts: Experts, projection: Projection) -> int:
    of_32 = experts.kind == "float" and experts.places[projection, "weight"][0].dtype == "F32"
    return 32 if of_32 else 16


def record(raw: Raw, recipe: Recipe) -> list[Bytes]:
    """The parts of a record, in the order of `shapes`."""
    found: list[Bytes] = []
    for projection in PROJECTIONS:
        weight, place = raw[projection, "weight"]
        if (projection, "scales") in raw:
            found += [
                raw[projection, _KEY_OF[part]][0] for part in PARTS if (projection, _KEY_OF[part]) in raw
            ]
            continue
        scale = raw.get((projection, "scale_inv"))
        if scale is None and recipe.bits is None:
            found.append(weight)
        else:
            matrix = to_mlx(weight, place.dtype, place.shape)
            if scale is not None:
                matrix = from_blocks(matrix, to_mlx(scale[0], scale[1].dtype, scale[1].shape))
            found += [to_bytes(part) for part in pack(matrix, recipe)]
        if (projection, "bias") in raw:
            found.append(raw[projection, "bias"][0])
    return found


def pack(matrix: mx.array, recipe: Recipe) -> list[mx.array]:
    """Weight, scales and, in mode affine, biases; lazy."""
    if recipe.bits is None:
        return [matrix]
    return list(mx.quantize(matrix, group_size=recipe.group_size, bits=recipe.bits, mode=recipe.mode))


def from_blocks(matrix: mx.array, scales: mx.array) -> mx.array:
    """fp8 [rows, width] with a scale per block, as bfloat16; lazy."""
    rows, width = matrix.shape
    below, beside = -rows % BLOCK, -width % BLOCK
    padded = mx.pad(mx.from_fp8(matrix, dtype=mx.bfloat16), [(0, below), (0, beside)])
    blocks = padded.reshape((rows + below) // BLOCK, BLOCK, (width + beside) // BLOCK, BLOCK)
    scaled = (blocks * scales[:, None, :, None]).reshape(rows + below, width + beside)
    return scaled[:rows, :width].astype(mx.bfloat16)


def to_mlx(data: Bytes, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """Bytes of a file as an array. Raises ConvertError for a type that MLX has not."""
    if dtype not in DTYPES:
        raise ConvertError(f"numbers of type {dtype} can't be converted")
    return mx.array(data).view(DTYPES[dtype]).reshape(shape)


def to_bytes(array: mx.array) -> Bytes:
    """An array's bytes, evaluated."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat if flat.dtype == mx.bool_ else flat.view(mx.uint8)).view(np.uint8)
