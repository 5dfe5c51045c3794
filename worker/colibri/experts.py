"""The feed-forward of routed experts out of a slab, as mlx-lm's SwitchGLU computes it.

The same kernels in the same order, so that where an expert lies makes no difference to its product. Numbers
that mlx-lm has no class for go through the same kernels: weights with one scale per row with constants in
place of the groups' (layout.py says which), in float32. A product's type is its input's, or the wider one of
the two where weights are wider; inputs are never the reason to convert weights, which would copy a slab.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri.layout import ExpertLayout, Projection
from mlxpool.shared.colibri.packing import OFFSETS, widest_group
from mlxpool.worker.colibri import dense
from mlxpool.worker.colibri.slab import Slab

Activation = Callable[[mx.array, mx.array], mx.array]

# From so many routed rows on mlx-lm sorts them by expert, and tells its kernels.
SORTED_FROM = 64


class Constants:
    """Scales of one and offsets, shared by all layers.

    An array for each matrix shape and value, which every slot is a view of. MLX's kernels for CUDA know no
    such views: they look for a slot's scales where they would lie if each had its own, beyond the array's
    end. There it is one array for each value, as large as the largest yet.
    """

    def __init__(self, backend: Backend) -> None:
        self._held: dict[tuple[float, int, int], mx.array] = {}
        self._whole = dense.Constants() if backend == "cuda" else None

    def of(self, value: float, slots: int, outputs: int, groups: int) -> mx.array:
        """[slots, outputs, groups]."""
        if self._whole is not None:
            return self._whole.view(value, (slots, outputs, groups))
        held = self._held.get((value, outputs, groups))
        if held is None:
            held = mx.full((outputs, groups), value, dtype=mx.float32)
            mx.eval(held)
            self._held[value, outputs, groups] = held
        return mx.broadcast_to(held[None], (slots, outputs, groups))


class Experts:
    """Of one layout. activation: takes the products of up_proj and of gate_proj, as SwitchGLU's does."""

    def __init__(self, layout: ExpertLayout, activation: Activation, constants: Constants) -> None:
        self._packing = layout.packing
        self.activation = activation
        self._constants = constants

    def __call__(self, slab: Slab, x: mx.array, slots: mx.array, ordered: bool) -> mx.array:
        """x [..., 1, D], slots [...], whose leading axes broadcast: [..., 1, D]. ordered: slots ascend."""
        up = self._project("up_proj", slab, x, slots, ordered)
        gate = self._project("gate_proj", slab, x, slots, ordered)
        return self._project("down_proj", slab, self.activation(up, gate), slots, ordered)

    def _project(
        self, projection: Projection, slab: Slab, x: mx.array, slots: mx.array, ordered: bool
    ) -> mx.array:
        packing, arrays = self._packing[projection], slab.arrays
        weight = arrays[projection, "weight"]
        if packing.scheme == "float":
            taken = x.astype(weight.dtype) if x.dtype == mx.float32 else x
            y = mx.gather_mm(taken, weight.swapaxes(-1, -2), rhs_indices=slots, sorted_indices=ordered)
        elif packing.scheme == "row":
            y = self._by_rows(weight, packing.bits, x, slots, ordered)
            y = y * mx.expand_dims(arrays[projection, "row_scales"][slots], -2)
        else:
            scales, biases = arrays[projection, "scales"], arrays.get((projection, "biases"))
            y = mx.gather_qmm(
                x if biases is None else x.astype(scales.dtype),
                weight,
                scales,
                biases,
                rhs_indices=slots,
                transpose=True,
                group_size=packing.group_size,
                bits=packing.bits,
                mode=packing.scheme,
                sorted_indices=ordered,
            )
        bias = arrays.get((projection, "bias"))
        if bias is not None:
            y = y + mx.expand_dims(bias[slots], -2)
        return y.astype(mx.float32) if x.dtype == mx.float32 else y

    def _by_rows(self, weight: mx.array, bits: int, x: mx.array, slots: mx.array, ordered: bool) -> mx.array:
        count, outputs, words = weight.shape
        inputs = words * 32 // bits
        group = widest_group(inputs)
        return mx.gather_qmm(
            x.astype(mx.float32),
            weight,
            self._constants.of(1.0, count, outputs, inputs // group),
            self._constants.of(-float(OFFSETS[bits]), count, outputs, inputs // group),
            rhs_indices=slots,
            transpose=True,
            group_size=group,
            bits=bits,
            sorted_indices=ordered,
        )
