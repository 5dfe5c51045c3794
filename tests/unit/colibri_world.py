"""Tiny GLMs with all of their experts in memory, by no part of the streaming runtime."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU

from mlxpool.worker.colibri.load import put
from mlxpool.worker.colibri.model import Model
from tests.tiny_glm import Floats


def with_experts(model: Model, numbers: Mapping[str, Floats]) -> Model:
    """Gives the model its routed experts, in float32."""
    args = model.args
    for layer in range(args.first_k_dense_replace, args.num_hidden_layers):
        experts = SwitchGLU(args.hidden_size, args.moe_intermediate_size, args.n_routed_experts)
        for projection in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts"
            each = [numbers[f"{prefix}.{one}.{projection}.weight"] for one in range(args.n_routed_experts)]
            experts[projection].weight = mx.array(np.stack(each))
        put(model, f"model.layers.{layer}.mlp.switch_mlp", experts)
    return model
