"""Safetensors files and model folders of any types, bfloat16 and fp8 among them, written without MLX."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Stored(NamedTuple):
    """A tensor as it goes into a file. data: its bytes, in whatever type numpy has for them."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any]


def cut(
    tensors: Mapping[str, Stored], shards: int, stem: str, *, sort: bool = False
) -> dict[str, dict[str, Stored]]:
    """Files of about as many tensors each, by name. sort: within a file as the safetensors library does, wide
    types first, then by name."""
    names = list(tensors)
    step = math.ceil(len(names) / shards)
    files: dict[str, dict[str, Stored]] = {}
    for number, start in enumerate(range(0, len(names), step)):
        part = names[start : start + step]
        if sort:
            part.sort(key=lambda name: (-tensors[name].data.itemsize, name))
        called = f"{stem}-{number + 1:05}-of-{shards:05}" if stem == "model" else f"{stem}-{number:05}"
        files[f"{called}.safetensors"] = {name: tensors[name] for name in part}
    return files


def write_folder(
    folder: Path, config: Mapping[str, Any], files: Mapping[str, Mapping[str, Stored]], *, index: bool
) -> Path:
    """A model folder with the tokenizer of tiny_models. index: with the list of what lies in which file."""
    from tests.tools import tiny_models

    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        write_safetensors(folder / name, tensors)
    bodies: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": config["eos_token_id"]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "chat_template": tiny_models.CHAT_TEMPLATE,
        },
    }
    if index:
        home = {tensor: name for name, tensors in files.items() for tensor in tensors}
        total = sum(one.data.nbytes for tensors in files.values() for one in tensors.values())
        bodies["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": home}
    for name, body in bodies.items():
        (folder / name).write_text(json.dumps(body, indent=1) + "\n")
    tiny_models.tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def write_safetensors(
    path: Path, tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None
) -> None:
    """The file, its tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "mlx"})}
    offset = 0
    for name, one in tensors.items():
        header[name] = {
            "dtype": one.dtype,
            "shape": list(one.shape),
            "data_offsets": [offset, offset + one.data.nbytes],
        }
        offset += one.data.nbytes
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with path.open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        file.writelines(_raw(tensors.values()))


def _raw(tensors: Iterable[Stored]) -> Iterable[bytes]:
    return (np.ascontiguousarray(one.data).tobytes() for one in tensors)
