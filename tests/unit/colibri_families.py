"""Tiny checkpoints of other mixtures of experts, as mlx-lm writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes, quantize_model

from tests.tools import tiny_models

_COMMON: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_SPARSE_QWEN = {"num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
_GROUPED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _SPARSE_QWEN,
    "qwen3_next": {
        **_SPARSE_QWEN,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 64,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 2,
    },
    "deepseek_v3": {
        **_GROUPED,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
    "glm4_moe": {**_GROUPED, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "gpt_oss": {"num_local_experts": 8, "sliding_window": 32},
}

_STACKED = re.compile(r"\.(?:switch_mlp|experts)\.(?=(?:gate|up|down)_proj\.)")
_NUMBERED = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write(kind: str, folder: Path, bits: int | None = 4, each: bool = False) -> Path:
    """A random checkpoint in float32, or packed from it in groups of 32. each: with a tensor per expert, as
    such models are published."""
    return write_config({**_COMMON, "model_type": kind, **CONFIGS[kind]}, folder, bits, each)


def write_config(config: dict[str, Any], folder: Path, bits: int | None = 4, each: bool = False) -> Path:
    """As `write`, of any config. each: under the names of three projections, or w1, w3 and w2 in a
    block_sparse_moe."""
    kind, arguments = _get_classes(config)
    model: Any = kind(arguments.from_dict(config))
    mx.random.seed(3)
    model.update(
        tree_unflatten(
            [
                (name, mx.random.normal(value.shape) * (0.5 if value.ndim == 1 else value.shape[-1] ** -0.5))
                for name, value in tree_flatten(model.parameters())
                if mx.issubdtype(value.dtype, mx.floating)
            ]
        )
    )
    if bits is not None:
        model, config = quantize_model(model, config, group_size=32, bits=bits)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(tree_flatten(model.parameters()))
    if each:
        for name in [name for name in tensors if _STACKED.search(name)]:
            before, projection, part = _STACKED.split(name)[0], *name.split(".")[-2:]
            called = _NUMBERED[projection] if before.endswith("block_sparse_moe") else projection
            for expert, tensor in enumerate(tensors.pop(name)):
                tensors[f"{before}.experts.{expert}.{called}.{part}"] = tensor
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    tiny_models.tokenizer().save(str(folder / "tokenizer.json"))
    return folder
