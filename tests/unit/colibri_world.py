"""Tiny models with all of their experts in memory, on mlx-lm's own classes: what a streamed one must equal.

By no part of the streaming runtime but the source, which says what a slot would hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear

from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri import artifact as artifacts
from mlxpool.shared.colibri.layout import PROJECTIONS, ExpertLayout, Quantised
from mlxpool.worker.cache.layers_memory import dtype_of
from mlxpool.worker.colibri.contract import ExpertSource
from mlxpool.worker.colibri.load import build, module_at, put
from mlxpool.worker.colibri.model import Model
from mlxpool.worker.colibri.sources import open_source
from tests.tiny_glm import Floats
from tests.tools.expert_fill import fill


def resident(folder: Path, backend: Backend = "cpu") -> Any:
    """The folder's model, its experts held in memory as slots would hold them."""
    artifact = artifacts.read(folder)
    source = open_source(artifact, backend, "buffered")
    model = build(artifact, backend)
    for layout in source.artifact.layers:
        put(model, layout.module, _switch(source, layout, module_at(model, layout.module).activation))
    source.close()
    mx.eval(model.parameters())
    return model


def with_experts(model: Model, numbers: Mapping[str, Floats]) -> Model:
    """Gives the model its routed experts, in float32."""
    args = model.args
    for layer in range(args.first_k_dense_replace, args.num_hidden_layers):
        experts = SwitchGLU(args.hidden_size, args.moe_intermediate_size, args.n_routed_experts)
        for projection in PROJECTIONS:
            prefix = f"model.layers.{layer}.mlp.experts"
            each = [numbers[f"{prefix}.{one}.{projection}.weight"] for one in range(args.n_routed_experts)]
            experts[projection].weight = mx.array(np.stack(each))
        put(model, f"model.layers.{layer}.mlp.switch_mlp", experts)
    return model


def _switch(source: ExpertSource, layout: ExpertLayout, activation: Any) -> SwitchGLU:
    held = {
        (part.projection, part.part): np.zeros((layout.experts, part.size_bytes), np.uint8)
        for part in layout.parts
    }
    for expert in range(layout.experts):
        fill(source, layout.layer, expert, {key: rows[expert] for key, rows in held.items()})
    made = SwitchGLU(1, 1, 1, activation)
    for projection, how in layout.packing.items():
        linear = _linear(how)
        for part in layout.parts:
            if part.projection == projection:
                rows = mx.array(held[projection, part.part]).reshape(-1).view(dtype_of(part.dtype))
                linear[part.part] = rows.reshape(layout.experts, *part.shape)
        made[projection] = linear
    return made


def _linear(how: Quantised) -> nn.Module:
    if how.scheme == "float":
        return SwitchLinear(1, 1, 1, bias=False)
    if how.scheme == "row":
        return _RowScaled(how.bits)
    linear = _Cast(64, 1, 1, False, 64, 8)
    linear.group_size, linear.bits, linear.mode = how.group_size, how.bits, how.scheme
    linear.pop("biases")
    return linear


class _Cast(QuantizedSwitchLinear):
    """Float32 inputs are cast to what the scales are of, and the product back."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        scales = self.scales.dtype
        taken = x if scales == mx.uint8 else x.astype(scales)
        return super().__call__(taken, indices, sorted_indices).astype(x.dtype)


class _RowScaled(nn.Module):
    """One float32 scale per row, over numbers that count from the middle of their range."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        experts, outputs, words = self.weight.shape
        inputs = words * 32 // self.bits
        group = next(size for size in (128, 64, 32) if inputs % size == 0)
        groups = (experts, outputs, inputs // group)
        out = mx.gather_qmm(
            x,
            self.weight,
            mx.ones(groups),
            mx.full(groups, -(2.0 ** (self.bits - 1))),
            rhs_indices=indices,
            transpose=True,
            group_size=group,
            bits=self.bits,
            sorted_indices=sorted_indices,
        )
        return out * mx.expand_dims(self.row_scales[indices], -2)
