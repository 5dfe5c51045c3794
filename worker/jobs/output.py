"""A computed model's folder, written into a stage and read back; `publishing` gives it its name.

Weights are written file by file, and evaluated tensor by tensor while they are, so a model far larger than
memory can be rewritten: what exists at once is one file's worth.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, save_config

from mlxpool.shared import checkpoint, staging
from mlxpool.shared.job_tasks import SHARD_BYTES
from mlxpool.shared.job_teller import Teller
from mlxpool.worker import load
from mlxpool.worker.jobs.process import JobError

# What a model's folder has beside weights and config: tokenizer, templates, generation settings.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_COPIED = (checkpoint.CONFIG_FILE, checkpoint.INDEX_FILE, staging.MANIFEST_FILE, "hf_quant_config.json")


def write_model(
    stage: Path, model: Any, config: dict[str, Any], source: Path, teller: Teller, begin: float, end: float
) -> int:
    """Everything a model folder has; returns the bytes of its weights. The model is empty afterwards.

    config: config.json to be. source: the folder whose other files are copied.
    """
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    keeps_vision = "vision_tower" in getattr(model, "model", {})
    # Nothing else may hold what a file has been written of.
    model.update(_emptied(model))
    total: int = sum(value.nbytes for value in weights.values())
    shards = _shards({name: value.nbytes for name, value in weights.items()})
    where: dict[str, str] = {}
    done = 0
    for number, members in enumerate(shards, 1):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        held = {}
        for name in members:
            held[name] = weights.pop(name)
            mx.eval(held[name])
            done += held[name].nbytes
            teller.bytes(begin + (end - begin) * done / total, "write", done, total)
        mx.save_safetensors(str(stage / file), held, metadata={"format": "mlx"})
        where |= dict.fromkeys(members, file)
        held.clear()
        mx.clear_cache()
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (stage / checkpoint.INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    save_config(dict(config), stage / checkpoint.CONFIG_FILE, keep_vision_config=keeps_vision)
    copy_others(source, stage)
    return total


def _emptied(model: Any) -> Any:
    from mlx.utils import tree_map

    return tree_map(lambda _: mx.array([]), model.parameters())


def _shards(sizes: dict[str, int]) -> list[list[str]]:
    """Names by file, in order, no file larger than SHARD_BYTES but for one with a single tensor."""
    shards: list[list[str]] = []
    held = 0
    for name, size_bytes in sizes.items():
        if not shards or held + size_bytes > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size_bytes
    return shards


def copy_others(source: Path, stage: Path) -> None:
    """Copy what a model's folder has beside weights and config. Raises OSError."""
    for path in sorted(source.iterdir()):
        is_ours = path.name in _NOT_COPIED or path.name.startswith(".")
        if path.suffix in _COPIED and not is_ours and path.is_file():
            shutil.copyfile(path, stage / path.name)


def read_back(stage: Path) -> None:
    """Whether what was written is a whole model: its files as their headers say, its tensors as its config
    does. Raises JobError."""
    try:
        found = checkpoint.read(stage)
        with load.reasons(found.model_type):
            load_model(stage, lazy=True, strict=True)
    except (checkpoint.CheckpointError, load.LoadError) as problem:
        raise JobError(f"what was written is not whole, so it was not published: {problem}") from None
