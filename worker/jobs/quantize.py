"""Quantising a model: layer by layer, as one rule for all, a recipe of mlx-lm's, or bits chosen for a target.

mlx-lm replaces the layers lazily; nothing is read before its file is written (output.py), so a model larger
than memory can be quantised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.utils import compute_bits_per_weight, get_total_parameters, quantize_model

from mlxpool.shared.job_tasks import QuantizeTask
from mlxpool.shared.job_teller import Teller
from mlxpool.shared.quantisation import Layer, TargetError, choose_bits
from mlxpool.worker.jobs import output, publishing
from mlxpool.worker.jobs.model import open_model
from mlxpool.worker.jobs.process import JobError

TASK = QuantizeTask

_Predicate = Callable[[str, Any], bool | dict[str, Any]]
# What is left for copying, reading back and publishing.
_WRITTEN = 0.95


def work(task: QuantizeTask, teller: Teller) -> dict[str, Any]:
    """The result: {model, path, bits_per_weight, weights_bytes, was_bytes, seconds}."""
    began_s = time.monotonic()
    models, source = Path(task.models), Path(task.folder)
    with publishing.staged(models, task.name, teller) as stage:
        teller.progress(0.0, "read", "the model's files")
        opened = open_model(source)
        model = opened.model
        if task.dtype is not None:
            _cast(model, getattr(mx, task.dtype))
        teller.progress(0.02, "quantize")
        model, config = quantize_model(
            model,
            opened.config,
            task.group_size,
            task.bits,
            mode=task.mode,
            quant_predicate=_predicate(task, model),
        )
        bits_per_weight = compute_bits_per_weight(model)
        size_bytes = output.write_model(stage, model, config, source, teller, 0.02, _WRITTEN)
        output.read_back(stage)
        publishing.publish(stage, models / task.name, f"quantize of {task.model}", teller)
    return {
        "model": task.name,
        "path": str(models / task.name),
        "bits_per_weight": round(bits_per_weight, 3),
        "weights_bytes": size_bytes,
        "was_bytes": opened.found.weights_bytes,
        "seconds": round(time.monotonic() - began_s, 2),
    }


def _cast(model: Any, dtype: mx.Dtype) -> None:
    """Every floating weight that the architecture lets be cast; lazy."""
    may: Callable[[str], bool] = getattr(model, "cast_predicate", lambda _: True)

    def cast(name: str, value: mx.array) -> mx.array:
        return value.astype(dtype) if may(name) and mx.issubdtype(value.dtype, mx.floating) else value

    model.update(tree_map_with_path(cast, model.parameters()))


def _predicate(task: QuantizeTask, model: Any) -> _Predicate | None:
    """What decides each layer's bits; None for one rule (or the architecture's own)."""
    if task.recipe is not None:
        return mixed_quant_predicate_builder(task.recipe, model, task.group_size)  # type: ignore[no-any-return]
    if task.target_bpw is None:
        return None
    bits = _bits_for(task.target_bpw, task.group_size, model)

    def chosen(path: str, _module: Any) -> bool | dict[str, Any]:
        if path not in bits:
            return False
        return {"group_size": task.group_size, "bits": bits[path], "mode": "affine"}

    return chosen


def _bits_for(target_bpw: float, group_size: int, model: Any) -> dict[str, int]:
    modules = [
        (path, module)
        for path, module in model.named_modules()
        if hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
    ]
    layers = [Layer(path, module.weight.size, module.weight.shape[-1]) for path, module in modules]
    packed_bits = sum(module.weight.nbytes * 8 for _, module in modules)
    all_bits = sum(value.nbytes * 8 for _, value in tree_flatten(model.parameters()))
    dtype_bits = modules[0][1].weight.dtype.size * 8 if modules else 16
    try:
        return choose_bits(
            layers,
            target_bpw,
            blocks=len(model.layers),
            total_weights=get_total_parameters(model),
            rest_bits=all_bits - packed_bits,
            scale_bits=2 * dtype_bits / group_size,
        )
    except TargetError as problem:
        raise JobError(f"{problem}; ask for that, or for bits") from None
