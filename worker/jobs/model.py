"""Models as jobs open them: checked from their headers, lazily, and computed with as a worker would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlxpool.shared import adapters, checkpoint
from mlxpool.shared.job_tasks import Trained
from mlxpool.shared.job_teller import Teller
from mlxpool.worker import load
from mlxpool.worker.jobs.process import JobError

# Weights read at once, between two words on how far it is.
_GROUP_BYTES = 64 * 1024 * 1024


class Opened(NamedTuple):
    """A model whose weights are still to be read. config: as mlx-lm writes it out again."""

    model: nn.Module
    config: dict[str, Any]
    found: checkpoint.Checkpoint


def open_model(folder: Path) -> Opened:
    """The model, nothing of it evaluated. Raises CheckpointError, LoadError."""
    found = checkpoint.read(folder)
    if found.config.get("model_file") is not None:
        raise JobError("config.json wants code of the folder run, which is never done here")
    with load.reasons(found.model_type):
        model, config = load_model(folder, lazy=True)
    return Opened(model, config, found)


def open_to_compute(folder: Path) -> Opened:
    """The same in the type that this backend computes in."""
    opened = open_model(folder)
    if load.backend() == "cpu":
        load.to_float32(opened.model)
    return opened


def evaluate(values: Any, teller: Teller, begin: float, end: float, stage: str) -> None:
    """Read a tree of weights in groups, told as this part of the whole."""
    weights = [value for _, value in tree_flatten(values)]
    total = sum(value.nbytes for value in weights) or 1
    done, group, held = 0, [], 0
    for value in weights:
        group.append(value)
        held += value.nbytes
        if held >= _GROUP_BYTES:
            mx.eval(group)
            done += held
            group, held = [], 0
            teller.bytes(begin + (end - begin) * done / total, stage, done, total)
    mx.eval(group)


def add_adapter(model: nn.Module, trained: Trained) -> None:
    """Put an adapter's layers into the model. Raises JobError where it does not fit."""
    folder = Path(trained.folder)
    try:
        adapters.read(folder)
        load_adapters(model, str(folder))
    except adapters.AdapterError as problem:
        raise JobError(f"the adapter {trained.id} can't be used: {problem}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        text = " ".join(str(problem).split())
        raise JobError(f"the adapter {trained.id} does not fit the model: {text}") from None
    model.eval()


def trained_on(trained: Trained) -> str | None:
    """The model that an adapter says it was trained on."""
    try:
        said = json.loads(adapters.read_config(Path(trained.folder))).get(adapters.BASE_KEY)
    except (adapters.AdapterError, ValueError, AttributeError):
        return None
    return said if isinstance(said, str) else None
