"""Matrices as colibri's container holds them, for everything but routed experts.

A matrix is bytes without a shape, of 4 or 8 bits a number, and float32 scales: one per row, or one per group
of a row. Its bytes are MLX's own packing already (signed bytes once they have 128 added), so they go through
MLX's kernels as they are:

- per row with scales of one and a bias that takes the offset away, the same for every matrix; the product is
  multiplied by the row's scale. Inputs and products are float32.
- in groups with the scale and offset of each group in bfloat16, which take the place of the float32 scale.
  Inputs are cast to bfloat16, products back to float32.

`kv_b_proj`, which mlx-lm's class has in two, is cut into its halves of keys and of values and otherwise left
as it is: the half of keys is used in both directions, never packed anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx import nn

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import Tensor
from mlxpool.shared.colibri.packing import GROUP_SIZES, OFFSETS, container_form, widest_group
from mlxpool.worker.cache.layers_memory import dtype_name


class Packing(NamedTuple):
    """group_size: of MLX's kernel. per_row: whether the file has one scale per row."""

    bits: int
    group_size: int
    per_row: bool


# MLX can't launch CUDA's product of more than a few rows of float32 with wider groups: their tiles of float32
# are too large for a block of the device.
_WIDEST_ON_CUDA = 64


def packing(
    name: str, shape: tuple[int, int], weight: mx.array, scales: mx.array, backend: Backend
) -> Packing:
    """What a matrix's bytes and scales say of it. Raises CheckpointError that names it."""
    raw, beside = (Tensor(dtype_name(each.dtype), each.shape, each.nbytes) for each in (weight, scales))
    form = container_form(name, shape, raw, beside)
    widest = _WIDEST_ON_CUDA if backend == "cuda" else GROUP_SIZES[0]
    return Packing(form.bits, form.group_size or widest_group(shape[1], widest), form.scheme == "row")


class Constants:
    """Scales of one and biases of minus the offset, shared by all matrices that are scaled per row.

    What is given are views of one array for each value, as large as the largest yet: ask for that one first.
    """

    def __init__(self) -> None:
        self._held: dict[float, mx.array] = {}

    def view(self, value: float, shape: Sequence[int]) -> mx.array:
        count = math.prod(shape)
        held = self._held.get(value)
        if held is None or held.size < count:
            held = self._held[value] = mx.full(count, value, dtype=mx.float32)
        return held[:count].reshape(shape)


class Packed(nn.Module):  # type: ignore[misc]  # mlx has no types here
    """A matrix [..., O, I], or one for each head, and its product with float32 inputs.

    Per row: `weight`, and `row_scales` that broadcast to the product. In groups: `weight`, `scales`,
    `biases`.
    """

    def __init__(self, how: Packing, constants: Constants, shape: Sequence[int]) -> None:
        super().__init__()
        *heads, outputs, inputs = shape
        self.how = how
        self.weight = mx.zeros((*heads, outputs, inputs * how.bits // 32), mx.uint32)
        groups = (*heads, outputs, inputs // how.group_size)
        if how.per_row:
            self.row_scales = mx.zeros((*heads, *((1,) if heads else ()), outputs))
            self._scales = constants.view(1.0, groups)
            self._biases = constants.view(-float(OFFSETS[how.bits]), groups)
        else:
            self.scales = mx.zeros(groups, mx.bfloat16)
            self.biases = mx.zeros(groups, mx.bfloat16)

    def product(self, x: mx.array, transpose: bool = True) -> mx.array:
        """x [..., I] with the matrix transposed: [..., O]; not transposed, x [..., O]: [..., I]."""
        how = self.how
        if how.per_row:
            if not transpose:
                x = x * self.row_scales
            out = mx.quantized_matmul(
                x, self.weight, self._scales, self._biases, transpose, how.group_size, how.bits
            )
            return out * self.row_scales if transpose else out
        out = mx.quantized_matmul(
            x.astype(mx.bfloat16), self.weight, self.scales, self.biases, transpose, how.group_size, how.bits
        )
        return out.astype(mx.float32)


class PackedLinear(Packed):
    def __call__(self, x: mx.array) -> mx.array:
        return self.product(x)


class PackedEmbedding(Packed):
    def __call__(self, tokens: mx.array) -> mx.array:
        how = self.how
        chosen = tokens.flatten()
        if how.per_row:
            groups = (tokens.size, self._scales.shape[-1])
            scales, biases = mx.ones(groups), mx.full(groups, -float(OFFSETS[how.bits]))
        else:
            scales, biases = (each[chosen].astype(mx.float32) for each in (self.scales, self.biases))
        rows = mx.dequantize(self.weight[chosen], scales, biases, how.group_size, how.bits)
        if how.per_row:
            rows = rows * self.row_scales[chosen][:, None]
        return rows.reshape(*tokens.shape, -1)


class PackedMultiLinear(Packed):
    """In the place of mlx-lm's MultiLinear. flipped: where the file has the matrices the other way round."""

    def __init__(self, how: Packing, constants: Constants, shape: Sequence[int], flipped: bool) -> None:
        super().__init__(how, constants, shape)
        self.flipped = flipped

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        return self.product(x, transpose != self.flipped)


def parts(raw: mx.array, scales: mx.array, how: Packing, outputs: int, inputs: int) -> dict[str, mx.array]:
    """A file's bytes and scales as `Packed` of one matrix [O, I] holds them, lazily."""
    data = raw.flatten().view(mx.uint8)
    if how.bits == 8:
        data = data ^ 0x80
    weight = data.reshape(outputs, inputs * how.bits // 8).view(mx.uint32)
    if how.per_row:
        return {"weight": weight, "row_scales": scales.reshape(outputs)}
    grouped = scales.reshape(outputs, -1)
    return {
        "weight": weight,
        "scales": grouped.astype(mx.bfloat16),
        "biases": (grouped * -OFFSETS[how.bits]).astype(mx.bfloat16),
    }


def halves(
    held: dict[str, mx.array], heads: int, keys: int
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """`parts` of a kv_b_proj as those of its halves of keys and of values, each with memory of its own."""
    both: tuple[dict[str, mx.array], dict[str, mx.array]] = ({}, {})
    for name, whole in held.items():
        by_head = whole.reshape(heads, -1, *whole.shape[1:])
        for half, piece in zip(both, (by_head[:, :keys], by_head[:, keys:]), strict=True):
            half[name] = mx.contiguous(piece[:, None] if name == "row_scales" else piece)
    return both
