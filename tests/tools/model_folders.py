"""Model folders with real safetensors headers and data of zeros, made without MLX.

For what is decided from headers and configs alone; folders whose model must run come from tiny_models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxpool.shared.checkpoint import DTYPE_BITS

LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
}

TensorSpec = Mapping[str, tuple[str, tuple[int, ...]]]


def header_of(tensors: TensorSpec) -> dict[str, Any]:
    """The header of a file that holds `tensors` (name → dtype, shape) one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx", "shape": "any text"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    return header


def write_safetensors(path: Path, header: Mapping[str, Any] | bytes, data_bytes: int | None = None) -> None:
    """A safetensors file of that header and `data_bytes` zeros, by default as many as the header says."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    if data_bytes is None:
        assert not isinstance(header, bytes)
        data_bytes = max(
            (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0
        )
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(data_bytes))


def write_model(
    folder: Path,
    tensors: TensorSpec | None = None,
    config: Mapping[str, Any] | None = None,
    file: str = "model.safetensors",
) -> Path:
    """A folder that checkpoint.read accepts. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG if config is None else config))
    (folder / "tokenizer.json").write_text("{}")
    write_safetensors(
        folder / file, header_of({"embed.weight": ("F16", (256, 64))} if tensors is None else tensors)
    )
    return folder
