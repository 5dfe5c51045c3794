"""Fusing: every layer with an adapter becomes one layer whose weights hold what the adapter adds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mlx.utils import tree_unflatten
from mlx_lm.utils import dequantize_model

from mlxpool.shared.job_tasks import FuseTask
from mlxpool.shared.job_teller import Teller
from mlxpool.worker.jobs import output, publishing
from mlxpool.worker.jobs.model import add_adapter, open_model, trained_on
from mlxpool.worker.jobs.process import JobError

TASK = FuseTask

_WRITTEN = 0.95


def work(task: FuseTask, teller: Teller) -> dict[str, Any]:
    """The result: {model, path, adapter, layers, weights_bytes, seconds}."""
    began_s = time.monotonic()
    models, source = Path(task.models), Path(task.folder)
    base = trained_on(task.adapter)
    if base is not None and base != task.model:
        print(f"note: {task.adapter.id} was trained on {base}")
    with publishing.staged(models, task.name, teller) as stage:
        teller.progress(0.0, "read", "the model's files")
        opened = open_model(source)
        model, config = opened.model, dict(opened.config)
        add_adapter(model, task.adapter)
        fused = [
            (name, module.fuse(dequantize=task.dequantize))
            for name, module in model.named_modules()
            if hasattr(module, "fuse")
        ]
        if not fused:
            raise JobError(f"the adapter {task.adapter.id} changes no layer of {task.model}")
        model.update_modules(tree_unflatten(fused))
        if task.dequantize:
            model = dequantize_model(model)
            config.pop("quantization", None)
            config.pop("quantization_config", None)
        size_bytes = output.write_model(stage, model, config, source, teller, 0.02, _WRITTEN)
        output.read_back(stage)
        publishing.publish(stage, models / task.name, f"fuse of {task.model} and {task.adapter.id}", teller)
    return {
        "model": task.name,
        "path": str(models / task.name),
        "adapter": task.adapter.id,
        "layers": len(fused),
        "weights_bytes": size_bytes,
        "seconds": round(time.monotonic() - began_s, 2),
    }
