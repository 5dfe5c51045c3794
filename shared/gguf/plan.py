"""What an import would write: every tensor by name, shape and type, and the config, from the header alone.

Everything that is unknown or missing is told here, before a byte is written; so the server can refuse at
once, and the process that does it starts from the same plan.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any, Literal

import msgspec

from mlxpool.shared.files import open_regular
from mlxpool.shared.text import cut

from . import cutters, rope
from .configs import Geometry, config, geometry
from .facts import Facts
from .families import EMBEDDING, OUTPUT, ROPE_FACTORS, Change, expected, family, place_of
from .formats import AFFINE_BITS, AFFINE_GROUP, F32
from .header import GgufError, Header, TensorInfo

# native: what MLX can compute with as it is stays so, the rest is float16, the type of its scales.
Dtype = Literal["float32", "bfloat16", "float16", "native"]
ELEMENT_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "native": 2}
# Scale and offset of a group, float16 each.
_GROUP_BYTES = 4
# One for each pair of a head's numbers. They are read at once, and the file may have holes of any size.
_MAX_FACTORS = 4_096
# How many missing tensors are named.
_NAMED = 3


class Piece(msgspec.Struct, frozen=True):
    """One tensor of the model. bits: it stays quantised; 0 = it becomes plain numbers."""

    parameter: str
    source: TensorInfo
    change: Change
    bits: int
    size_bytes: int


class Plan(msgspec.Struct, frozen=True):
    """config: config.json but for its tokens' ids. pieces: by parameter."""

    header: Header
    dtype: Dtype
    config: dict[str, Any]
    pieces: tuple[Piece, ...]

    @property
    def weights_bytes(self) -> int:
        """What all weights take on disk."""
        return sum(piece.size_bytes for piece in self.pieces)


def plan(header: Header, dtype: Dtype) -> Plan:
    """How a model becomes a folder. Raises GgufError naming what is not known or does not fit."""
    facts = Facts(header.metadata)
    known = family(facts.architecture)
    cutters.kind(facts)
    tensors = dict(header.tensors)
    if EMBEDDING not in tensors or len(tensors[EMBEDDING].shape) != 2:
        raise GgufError(
            f"the GGUF has no {EMBEDDING} of rows of numbers: is it a part, an adapter, a projector?"
        )
    lengths = geometry(facts, tensors[EMBEDDING].shape[0])
    if lengths.layers > len(tensors):
        raise GgufError(f"{facts.own('block_count')} is {lengths.layers}, with {len(tensors)} tensors in all")
    made = config(facts, known, lengths, is_tied=OUTPUT not in tensors)
    factors = tensors.pop(ROPE_FACTORS, None)
    if factors is not None:
        made |= _rope_factors(factors, made, facts)
    pieces = [
        _piece(tensor, place_of(name, known, lengths.layers), lengths, dtype)
        for name, tensor in tensors.items()
    ]
    missing = [name for name in expected(known, lengths.layers) if name not in tensors]
    if missing:
        raise GgufError(
            f"the GGUF lacks {len(missing)} tensors of {known.model_type}: {', '.join(missing[:_NAMED])}"
        )
    made["torch_dtype"] = "float16" if dtype == "native" else dtype
    pieces.sort(key=lambda piece: piece.parameter)
    if dtype == "native":
        made["quantization"] = _quantization(pieces)
    return Plan(header, dtype, made, tuple(pieces))


def _piece(tensor: TensorInfo, place: Any, lengths: Geometry, dtype: Dtype) -> Piece:
    wanted = tuple(lengths.side(side) for side in place.sides)
    if tensor.shape != wanted:
        raise GgufError(
            f"tensor {cut(tensor.name)} is {list(tensor.shape)}, where the metadata means {list(wanted)}"
        )
    bits = AFFINE_BITS.get(tensor.format, 0) if dtype == "native" and len(wanted) == 2 else 0
    if bits:
        size_bytes = tensor.elements * bits // 8 + tensor.elements // AFFINE_GROUP * _GROUP_BYTES
    else:
        size_bytes = tensor.elements * ELEMENT_BYTES[dtype]
    return Piece(place.parameter, tensor, place.change, bits, size_bytes)


def _rope_factors(factors: TensorInfo, made: dict[str, Any], facts: Facts) -> dict[str, Any]:
    """The part of the config that the factors stand for."""
    if made["model_type"] != "llama" or factors.format != F32 or len(factors.shape) != 1:
        raise GgufError(f"{ROPE_FACTORS} of {facts.architecture} is not known here")
    if factors.elements > _MAX_FACTORS:
        raise GgufError(
            f"{ROPE_FACTORS} has {factors.elements} factors; {_MAX_FACTORS} are the most believed"
        )
    try:
        with open_regular(factors.path) as file:
            file.seek(factors.offset)
            raw = file.read(factors.size_bytes)
            values = struct.unpack(f"<{factors.elements}f", raw)
    except (OSError, struct.error) as problem:
        raise GgufError(f"{ROPE_FACTORS} can't be read: {problem}") from None
    scaled = rope.llama3_scaling(values, made["rope_theta"], made["head_dim"])
    return {} if scaled is None else {"rope_scaling": scaled}


def _quantization(pieces: list[Piece]) -> dict[str, Any]:
    """mlx-lm's `quantization` block: the commonest width, and each layer that differs by name."""
    bits_of = {piece.parameter.removesuffix(".weight"): piece.bits for piece in pieces if piece.bits}
    if not bits_of:
        raise GgufError(
            "the GGUF holds no tensor as Q4_0, Q4_1 or Q8_0, so native would keep nothing; take bfloat16"
        )
    usual = Counter(bits_of.values()).most_common(1)[0][0]
    differing = {
        module: {"group_size": AFFINE_GROUP, "bits": bits}
        for module, bits in bits_of.items()
        if bits != usual
    }
    return {"group_size": AFFINE_GROUP, "bits": usual, **differing}
