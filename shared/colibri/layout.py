"""Where the experts of a folder lie and how a slot in memory holds one. Facts alone, no reading.

An expert's weights are three projections of several parts each. A *piece* is one such tensor as it lies on
disk, for all experts of a layer; a *part* is one array as a slot holds it. A part is filled from one piece,
by a plain read wherever memory holds what the disk does (`fill` "copy").

How numbers are held. Slots hold what the file holds, byte for byte, on every backend, but for three things:
experts that are plain 16-bit floats are widened to float32 on the CPU backend, whose gathered product knows
no other type ("widen"); signed 8-bit weights are held with 128 added, because MLX's kernels count from zero
("offset"); and one float32 scale per group (`.qs`, grouped) becomes a bfloat16 scale and a bfloat16 bias of
-8 times it ("group_scales", "group_biases"), as many bytes as before. Weights with one float32 scale per row
need no other form: they go through the kernels with scales of one and a bias of -8 (4 bits) or -128 (8 bits)
that all layers share, and the product is multiplied by the row's scale.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from mlxpool.shared.colibri import families

Projection = Literal["gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("gate_proj", "up_proj", "down_proj")

PartName = Literal["weight", "scales", "biases", "row_scales", "bias"]
Fill = Literal["copy", "widen", "offset", "group_scales", "group_biases"]

# stacked: MLX safetensors, one tensor per projection and part with an axis of experts. experts: safetensors
# with one tensor per expert. container: colibri's own, one per expert with `.qs` scales. records: what
# `mlxpool colibri convert` writes.
Form = Literal["stacked", "experts", "container", "records"]

# float: plain matrices. affine: MLX's integer groups with scales and biases. row: one scale per row. Others
# are MLX's modes of floating groups, which have scales and no biases.
Scheme = Literal["float", "affine", "row", "mxfp4", "mxfp8", "nvfp4"]

# What a slot's projection (weight and scales together) is rounded up to in plans, and a record's start on
# disk: the page of Apple silicon, and a multiple of every disk's block.
ALIGN_BYTES = 16 * 1024


class Place(msgspec.Struct, frozen=True):
    """One tensor as it lies in a file. offset: of its first byte in the file. dtype: safetensors."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class Strided(msgspec.Struct, frozen=True, tag="strided"):
    """One file, expert e at offset + e * stride."""

    file: str
    offset: int
    stride: int

    def at(self, expert: int) -> tuple[str, int]:
        return self.file, self.offset + expert * self.stride


class Scattered(msgspec.Struct, frozen=True, tag="scattered"):
    """A place of its own for each expert. files: names, named by index in `of`."""

    files: tuple[str, ...]
    of: tuple[int, ...]
    offsets: tuple[int, ...]

    def at(self, expert: int) -> tuple[str, int]:
        return self.files[self.of[expert]], self.offsets[expert]


class Piece(msgspec.Struct, frozen=True):
    """A tensor of every expert of a layer as it lies on disk. shape, size_bytes: of one expert's.

    name: unique in its layer, such as "gate_proj.weight" or "gate_proj.weight.qs".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    places: Strided | Scattered


class Part(msgspec.Struct, frozen=True):
    """An array of a slot. dtype, shape: as held, of one slot. piece: the name of what it is filled from.

    phase: how far from a block's beginning the first slot should begin, so that direct reads find it lying as
    its bytes do in their file.
    """

    projection: Projection
    part: PartName
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    piece: str
    fill: Fill = "copy"
    phase: int = 0


class Quantised(msgspec.Struct, frozen=True):
    """How one projection's numbers are packed. group_size: 0 for float and row."""

    scheme: Scheme
    bits: int
    group_size: int = 0


class ExpertLayout(msgspec.Struct, frozen=True):
    """The experts of one layer. module: path of the module in the model whose call is streamed, such as
    "model.layers.3.mlp.switch_mlp". packing: per projection, they may differ. parts: in a record's order."""

    layer: int
    module: str
    experts: int
    pieces: tuple[Piece, ...]
    parts: tuple[Part, ...]
    packing: dict[Projection, Quantised]

    @property
    def record_bytes(self) -> int:
        """What one expert takes on disk: what is read for one miss."""
        return sum(piece.size_bytes for piece in self.pieces)

    @property
    def held_bytes(self) -> int:
        """What one expert takes in a slot."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def slot_bytes(self) -> int:
        """What a plan counts for a slot: each projection's parts together, rounded up to ALIGN_BYTES."""
        total = 0
        for projection in PROJECTIONS:
            held = sum(part.size_bytes for part in self.parts if part.projection == projection)
            total += -(-held // ALIGN_BYTES) * ALIGN_BYTES
        return total

    @property
    def kind(self) -> tuple[object, ...]:
        """Layers of equal kind can share working slots."""
        return tuple((part.projection, part.part, part.dtype, part.shape) for part in self.parts)


class Artifact(msgspec.Struct, frozen=True):
    """A folder whose experts can be streamed, as its headers describe it.

    layers: of the main model's layers that have routed experts, in order. mtp: that of its draft layer (index
    num_hidden_layers), None where the folder holds none. dense: every other tensor of the main model, by its
    name in the file; mtp_dense: those of the draft layer. has_indexer: whether sparse attention can choose
    (without it attention is dense). files: names of all files that are read. stamp: as `checkpoint.stamp`.
    """

    folder: str
    form: Form
    model_type: str
    config: dict[str, Any]
    layers: tuple[ExpertLayout, ...]
    mtp: ExpertLayout | None
    dense: dict[str, Place]
    mtp_dense: dict[str, Place]
    has_indexer: bool
    files: tuple[str, ...]
    stamp: str

    @property
    def layouts(self) -> dict[int, ExpertLayout]:
        """By layer, the draft layer's included."""
        found = {layout.layer: layout for layout in self.layers}
        return found if self.mtp is None else {**found, self.mtp.layer: self.mtp}

    @property
    def top_k(self) -> int:
        """Experts a token is routed to."""
        return families.number(self.config, families.TOP_K) or 1
