"""Converting a checkpoint into records whose experts can be streamed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm.utils import _get_classes

from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri.records import Recipe
from mlxpool.shared.job_tasks import ColibriConvertTask
from mlxpool.shared.job_teller import Teller
from mlxpool.worker import load
from mlxpool.worker.colibri import load as colibri_load
from mlxpool.worker.colibri import model as colibri_model
from mlxpool.worker.colibri.convert.terms import ConvertError
from mlxpool.worker.colibri.convert.work import Order, convert
from mlxpool.worker.jobs import output
from mlxpool.worker.jobs.process import JobError

TASK = ColibriConvertTask


def work(task: ColibriConvertTask, teller: Teller) -> dict[str, Any]:
    """The result: {model, path, experts_bytes, dense_bytes, kept_bytes, layers, draft, seconds}."""
    began_s = time.monotonic()
    order = Order(
        source=Path(task.folder),
        target=Path(task.target),
        recipe=Recipe(task.bits, task.group_size, task.mode),
        given=task.given,
        verify=task.verify,
    )
    try:
        done = convert(order, teller, empty_model, output.copy_others)
    except ConvertError as problem:
        raise JobError(str(problem)) from None
    return {
        "model": order.target.name,
        "path": str(order.target),
        "experts_bytes": done.experts_bytes,
        "dense_bytes": done.dense_bytes,
        "kept_bytes": done.kept_bytes,
        "layers": done.layers,
        "draft": done.has_draft,
        "seconds": round(time.monotonic() - began_s, 2),
    }


def empty_model(config: Mapping[str, Any]) -> Any:
    """The architecture, none of its random weights made. Raises CheckpointError, LoadError."""
    if config.get("model_file") is not None:
        raise CheckpointError("config.json wants code of the folder run, which is never done here")
    if config["model_type"] == colibri_load.MODEL_TYPE:
        return colibri_model.Model(colibri_model.arguments(dict(config), has_indexer=True))
    with load.reasons(str(config["model_type"])):
        made, arguments = _get_classes(dict(config))
        return made(arguments.from_dict(dict(config)))
