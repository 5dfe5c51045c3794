"""Adapters for tiny models: random matrices, written as mlx_lm.lora writes them. Needs no MLX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

# Of the tiny llama: name → (in, out).
LAYERS = {
    f"model.layers.{layer}.{name}": shape
    for layer in (0, 1)
    for name, shape in (
        ("self_attn.q_proj", (64, 64)),
        ("self_attn.v_proj", (64, 32)),
        ("mlp.down_proj", (128, 64)),
    )
}


def make(
    folder: Path,
    seed: int = 1,
    rank: int = 4,
    scale: Any = 2.0,
    layers: Mapping[str, tuple[int, int]] = LAYERS,
    **config: Any,
) -> Path:
    """Write the adapter's folder; returns it. config: keys of its adapter_config.json."""
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, (into, out) in layers.items():
        tensors[f"{name}.lora_a"] = draw.normal(size=(into, rank)).astype(np.float32) / into**0.5
        tensors[f"{name}.lora_b"] = draw.normal(size=(rank, out)).astype(np.float32) / rank**0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {
        "rank": rank,
        "scale": scale,
        "dropout": 0.0,
        "keys": sorted({_key(name) for name in layers}),
    }
    said = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def _key(name: str) -> str:
    return name.split(".", 3)[-1]
