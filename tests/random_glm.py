"""GLM-5.2 folders of any size, of random numbers: what benchmarks stream, without tokens anyone could read.

Experts are written layer by layer from one block of random bytes, as fast as the disk takes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from mlxpool.shared.colibri.layout import PROJECTIONS
from mlxpool.worker.colibri.load import Absent
from mlxpool.worker.colibri.model import Model, arguments
from tests import tiny_glm

Numbers = Literal["4bit", "float32"]

GROUP_SIZE = 64
_BLOCK_BYTES = 64 * 1024 * 1024

# 36 layers of 64 experts of 10.6 MB: 24.5 GB at 4 bits.
GPU = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 37,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    # As GLM-5.2 has it, and no fewer: MLX's CUDA kernel for packed matrices reads ahead past the end of those
    # whose rows are fewer than three of its tiles, of 64 numbers or a group.
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
    "head_dim": 64,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "index_topk": 2048,
    "indexer_types": ["full"] + (["full"] + ["shared"] * 3) * 9,
    "max_position_embeddings": 32768,
    "num_nextn_predict_layers": 0,
}

# 6 layers of 16 experts of 6.3 MB in float32.
CPU = {
    "hidden_size": 512,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 7,
    "num_nextn_predict_layers": 0,
}


def write(folder: Path, shape: Mapping[str, Any], numbers: Numbers, seed: int = 0) -> None:
    """A folder in MLX's stacked form. numbers: of every matrix; what stays is bfloat16 or float32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_glm.config(**shape)
    if numbers == "4bit":
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    _dense(folder, config, mx.bfloat16 if numbers == "4bit" else mx.float32, seed)
    draw = np.random.default_rng(seed)
    block = draw.integers(0, 256, _BLOCK_BYTES, np.uint8)
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        _experts(folder / f"model-experts-{layer:03}.safetensors", config, layer, numbers, block)


def _dense(folder: Path, config: dict[str, Any], dtype: mx.Dtype, seed: int) -> None:
    mx.random.seed(seed)
    model = Model(arguments(config, has_indexer=True))
    for layer in model.layers:
        if hasattr(layer.mlp, "switch_mlp"):
            layer.mlp.switch_mlp = Absent(None)
            gate = layer.mlp.gate
            gate.weight = mx.random.normal(gate.weight.shape) / gate.weight.shape[1] ** 0.5
    model.update(tree_map(lambda one: one.astype(dtype), model.parameters()))
    if "quantization" in config:
        nn.quantize(model, GROUP_SIZE, 4)
    weights = dict(tree_flatten(model.parameters()))
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model-dense.safetensors"), weights)


def _experts(
    path: Path, config: Mapping[str, Any], layer: int, numbers: Numbers, block: npt.NDArray[np.uint8]
) -> None:
    hidden, inner, experts = (
        config[key] for key in ("hidden_size", "moe_intermediate_size", "n_routed_experts")
    )
    header: dict[str, Any] = {}
    tensors: list[tuple[str, int, int]] = []
    at = 0

    def add(name: str, part: str, dtype: str, shape: tuple[int, ...], width: int, into: int) -> None:
        nonlocal at
        size = int(np.prod(shape)) * width
        header[f"{name}.{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        tensors.append((part, size, into))
        at += size

    for projection in PROJECTIONS:
        out, into = (hidden, inner) if projection == "down_proj" else (inner, hidden)
        name = f"model.layers.{layer}.mlp.switch_mlp.{projection}"
        if numbers == "float32":
            add(name, "weight", "F32", (experts, out, into), 4, into)
            continue
        add(name, "weight", "U32", (experts, out, into // 8), 4, into)
        for part in ("scales", "biases"):
            add(name, part, "BF16", (experts, out, into // GROUP_SIZE), 2, into)
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with path.open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        for number, (part, size, into) in enumerate(tensors):
            # Of unit variance behind a projection: 4 bits are uniform in -8..7 steps.
            step = np.float32(1 / (4.6 * into**0.5))
            if part == "weight" and numbers == "4bit":
                _repeated(file, np.roll(block, 4096 * (number + layer)), size)
            elif part == "weight":
                draw = np.random.default_rng(layer * 97 + number)
                some = draw.standard_normal(_BLOCK_BYTES // 16, np.float32) / np.float32(into**0.5)
                _repeated(file, some.view(np.uint8), size)
            else:
                value = step if part == "scales" else np.float32(-8 * step)
                half = np.array([value.view(np.uint32) >> 16], np.uint16)
                _repeated(file, np.repeat(half, _BLOCK_BYTES // 8).view(np.uint8), size)


def _repeated(file: Any, block: npt.NDArray[np.uint8], size: int) -> None:
    while size:
        part = memoryview(block[: min(size, len(block))])
        file.write(part)
        size -= len(part)
