"""How an expert's numbers are packed, judged by what lies on disk. Pure.

MLX says it in config.json, and the shapes have to agree. colibri's container says nothing: the bytes of a
matrix and of its scales, against the shape that the config gives it, leave one form or none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from mlxpool.shared.checkpoint import CheckpointError, Tensor
from mlxpool.shared.colibri.layout import Fill, Part, PartName, Projection, Quantised, Scheme
from mlxpool.shared.quantisation import BITS, FIXED_MODES

FLOATS = ("F32", "F16", "BF16")
MLX_PARTS: tuple[PartName, ...] = ("weight", "scales", "biases", "bias")
# The kernels' own limits: groups that they know, whole in a row.
GROUP_SIZES = (128, 64, 32)
# What is added to a container's signed numbers of so many bits, so that none is below zero.
OFFSETS = {4: 8, 8: 128}
CONVERT = "`mlxpool colibri convert` makes records of it that can"

# colibri's names for what it packs in other ways.
_STAMPS = {"int8-row": (8, False), "int4-row": (4, False), "int4-grouped": (4, True)}


class Packed(Quantised, frozen=True):
    """A projection as found. outputs, inputs: of its matrix. parts: as a slot holds them."""

    outputs: int = 0
    inputs: int = 0
    parts: tuple[Part, ...] = ()

    @property
    def quantised(self) -> Quantised:
        return Quantised(self.scheme, self.bits, self.group_size)


def mlx(
    where: str, path: str, projection: Projection, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> Packed:
    """A projection in MLX's form. tensors: of one expert, by part. path: of the module, as config.json names
    it. where: how an error begins. Raises CheckpointError."""
    said = _said(where, path, config) if tensors["weight"].dtype == "U32" else None
    return _matrix(where, projection, tensors, said)


def record(where: str, projection: Projection, tensors: Mapping[str, Tensor], said: Quantised) -> Packed:
    """A projection of a record. said: what its index says of it. Raises CheckpointError where that and the
    parts' shapes don't go together."""
    told = None
    if said.scheme != "float":
        told = _known(f"{where}: its index's", said.scheme, said.bits, said.group_size)
    found = _matrix(where, projection, tensors, told)
    if found.quantised != said:
        raise CheckpointError(f"{where} is of {_in_words(found)}, and said to be of {_in_words(said)}")
    return found


def _matrix(
    where: str, projection: Projection, tensors: Mapping[str, Tensor], said: Quantised | None
) -> Packed:
    """said: None where nothing is told of plain numbers."""
    weight = tensors["weight"]
    if weight.dtype not in (*FLOATS, "U32"):
        raise CheckpointError(
            f"{where}.weight is {weight.dtype}, which can't be streamed as it is: {CONVERT}"
        )
    unknown = sorted(set(tensors) - set(MLX_PARTS))
    if unknown:
        raise CheckpointError(f"{where}.{unknown[0]}: not known how to stream it: {CONVERT}")
    if len(weight.shape) != 2 or not math.prod(weight.shape):
        raise CheckpointError(f"{where}.weight is of shape {list(weight.shape)}, not a matrix")
    if (weight.dtype == "U32") != (said is not None):
        how = "plain numbers" if said is None else _in_words(said)
        raise CheckpointError(f"{where}.weight is {weight.dtype}, and said to be of {how}")
    outputs, inputs = weight.shape
    if said is not None:
        inputs = _unpacked(where, weight, tensors, said)
    else:
        said = Quantised("float", 8 * weight.size_bytes // math.prod(weight.shape))
        if "scales" in tensors or "biases" in tensors:
            raise CheckpointError(f"{where}.weight is {weight.dtype} and has scales")
    bias = tensors.get("bias")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype not in FLOATS):
        raise CheckpointError(f"{where}.bias is {bias.dtype} {list(bias.shape)}, not {outputs} numbers")
    parts = tuple(
        Part(projection, part, one.dtype, one.shape, one.size_bytes, piece=f"{projection}.{part}")
        for part in MLX_PARTS
        if (one := tensors.get(part)) is not None
    )
    return Packed(said.scheme, said.bits, said.group_size, outputs, inputs, parts)


def _said(where: str, path: str, config: Mapping[str, Any]) -> Quantised:
    """What config.json says of the module at `path`."""
    general = config.get("quantization", config.get("quantization_config"))
    own = general.get(path) if isinstance(general, dict) else None
    said = own if isinstance(own, dict) else general
    if not isinstance(said, dict):
        raise CheckpointError(
            f"{where}.weight is packed, and config.json has no `quantization` that says how"
        )
    return _known(
        f"{where}: config.json's", said.get("mode", "affine"), said.get("bits"), said.get("group_size")
    )


def _known(whose: str, scheme: Any, bits: Any, group: Any) -> Quantised:
    """Raises CheckpointError unless MLX packs like this."""
    if scheme == "affine":
        if type(bits) is not int or bits not in BITS or type(group) is not int or group not in GROUP_SIZES:
            raise CheckpointError(f"{whose} {bits} bits in groups of {group} aren't known")
        return Quantised("affine", bits, group)
    if not isinstance(scheme, str) or scheme not in FIXED_MODES:
        raise CheckpointError(f"{whose} quantization mode {scheme!r} isn't known")
    group, bits = FIXED_MODES[scheme]
    return Quantised(cast("Scheme", scheme), bits, group)


def _in_words(packed: Quantised) -> str:
    groups = f" in groups of {packed.group_size}" if packed.group_size else ""
    return f"{packed.bits} bits{groups} ({packed.scheme})"


def _unpacked(where: str, weight: Tensor, tensors: Mapping[str, Tensor], said: Quantised) -> int:
    """How many inputs the packed matrix has."""
    outputs, words = weight.shape
    inputs, rest = divmod(words * 32, said.bits)
    wanted: dict[str, tuple[str, ...]] = {"scales": FLOATS, "biases": FLOATS}
    if said.scheme != "affine":
        wanted = {"scales": ("U8",)}
    if rest or inputs % said.group_size:
        raise CheckpointError(
            f"{where}.weight: rows of {words} words aren't whole groups of {_in_words(said)}"
        )
    shape = (outputs, inputs // said.group_size)
    for part in ("scales", "biases"):
        one = tensors.get(part)
        if (one is not None) != (part in wanted):
            raise CheckpointError(
                f"{where}: has {'no' if one is None else ''} {part}, which {said.scheme} "
                f"{'needs' if one is None else 'does not have'}"
            )
        if one is not None and (one.shape != shape or one.dtype not in wanted[part]):
            raise CheckpointError(
                f"{where}.{part} is {one.dtype} {list(one.shape)} where {said.bits} bits in groups of "
                f"{said.group_size} make it {list(shape)}"
            )
    return inputs


def container(
    where: str,
    projection: Projection,
    shape: tuple[int, int],
    tensors: Mapping[str, Tensor],
    stamp: str | None,
) -> Packed:
    """A projection in colibri's form. tensors: "weight" and "weight.qs" of one expert. shape: outputs and
    inputs. stamp: the name of a format that the file gives it. Raises CheckpointError."""
    outputs, inputs = shape
    weight, scales = tensors["weight"], tensors.get("weight.qs")
    form = container_form(f"{where}.weight", shape, weight, scales, stamp)
    of = f"{projection}.weight"
    if scales is None:
        plain = Part(projection, "weight", "F32", shape, weight.size_bytes, piece=of)
        return Packed("float", 32, 0, outputs, inputs, (plain,))
    fill: Fill = "copy" if form.bits == 4 else "offset"
    words = (outputs, inputs * form.bits // 32)
    data = Part(projection, "weight", "U32", words, weight.size_bytes, piece=of, fill=fill)
    if form.scheme == "row":
        rows = Part(projection, "row_scales", "F32", (outputs,), scales.size_bytes, piece=f"{of}.qs")
        return Packed("row", form.bits, 0, outputs, inputs, (data, rows))
    grouped, half = (outputs, inputs // form.group_size), scales.size_bytes // 2
    made = (
        Part(projection, "scales", "BF16", grouped, half, piece=f"{of}.qs", fill="group_scales"),
        Part(projection, "biases", "BF16", grouped, half, piece=f"{of}.qs", fill="group_biases"),
    )
    return Packed("affine", form.bits, form.group_size, outputs, inputs, (data, *made))


def container_form(
    name: str, shape: tuple[int, int], weight: Tensor, scales: Tensor | None, stamp: str | None = None
) -> Quantised:
    """How a matrix of colibri's is packed: of float, row or affine (in groups). name: for errors. shape:
    outputs and inputs. scales: its `.qs`. stamp: the format that its file names. Raises CheckpointError."""
    outputs, inputs = shape
    if stamp is not None and stamp not in _STAMPS and stamp != "f32":
        raise CheckpointError(f"{name} is of colibri's format {stamp!r}, which can't be streamed here")
    if scales is None:
        if weight.dtype != "F32" or weight.size_bytes != 4 * outputs * inputs:
            raise CheckpointError(f"{name}: {weight.dtype}, and has no scales (.qs)")
        return Quantised("float", 32)
    bits, groups = _inferred(name, shape, weight, scales)
    if stamp is not None and _STAMPS.get(stamp) != (bits, groups > 1):
        raise CheckpointError(f"{name} is said to be {stamp!r}, which its bytes aren't")
    group = inputs // groups
    if inputs % groups or inputs % GROUP_SIZES[-1] or (groups > 1 and group not in GROUP_SIZES):
        raise CheckpointError(
            f"{name}: {inputs} inputs in {groups} groups; groups of {GROUP_SIZES} can be read"
        )
    return Quantised("row", bits) if groups == 1 else Quantised("affine", bits, group)


def _inferred(name: str, shape: tuple[int, int], weight: Tensor, scales: Tensor) -> tuple[int, int]:
    """Bits and groups per row."""
    outputs, inputs = shape
    held, said = weight.size_bytes, scales.size_bytes
    rows, rest = divmod(said, 4 * outputs)
    whole = scales.dtype == "F32" and not rest and rows > 0
    if weight.dtype in ("U8", "I8") and whole:
        if held == outputs * inputs and rows == 1:
            return 8, 1
        if held * 2 == outputs * inputs and 1 <= rows <= inputs:
            return 4, rows
    others = {
        "int2 (2 bits per row)": outputs * -(-inputs // 4),
        "int3-g64": outputs * -(-inputs // 64) * 24,
        "e8-iq3-lattice": outputs * -(-inputs // 256) * 98,
        "fp8-e4m3-b128": outputs * inputs,
    }
    for foreign, size in others.items():
        if held == size:
            raise CheckpointError(
                f"{name} is of colibri's format {foreign}, which can't be streamed here; int4 (per row "
                "or grouped) and int8 per row can"
            )
    raise CheckpointError(
        f"{name} has {held} bytes and {said} of scales: no format that is known makes that of "
        f"{outputs} × {inputs}"
    )


def widest_group(inputs: int, widest: int = GROUP_SIZES[0]) -> int:
    """Of a row that has one scale, by which the kernels take it: the wider, the fewer constants to read.
    widest: that the kernels take."""
    return next(group for group in GROUP_SIZES if group <= widest and inputs % group == 0)


def widened(part: Part) -> Part:
    """A plain 16-bit part as float32 holds it."""
    return Part(
        part.projection,
        part.part,
        "F32",
        part.shape,
        2 * part.size_bytes,
        piece=part.piece,
        fill="widen",
    )


def is_narrow_float(scheme: Scheme, part: Part) -> bool:
    return scheme == "float" and part.dtype in ("F16", "BF16")
