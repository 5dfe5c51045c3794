"""Load a model folder for this backend, with progress. Runs on the engine's thread.

The folder is checked from its headers first, so most faults are named before a byte of weights is read.
mlx-lm builds the model lazily; its weights are then evaluated in groups, each one a line of loading
progress. On the CPU backend, whose 16-bit and quantised kernels are scalar, weights are served as
float32: cast, or dequantised from float32 scales, group by group, so that never more than one group
exists twice. Code that a folder brings along is never run.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model

from mlxpool.shared import checkpoint
from mlxpool.shared.backend import Backend
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.worker import cpu_attention
from mlxpool.worker.cache.fingerprint import ModelFiles
from mlxpool.worker.engine.admission import KvCost, LayerKv
from mlxpool.worker.engine.terms import Loaded, Stream

# Weights evaluated at once: many lines of progress for a large model, one or two for a small one, and
# what exists twice while it is cast.
_GROUP_BYTES = 128 * 1024 * 1024

# Freed buffers that MLX may keep: enough for a decode step's and a prefill chunk's own.
_CACHE_LIMIT_BYTES = 1024 * 1024 * 1024

# A reason is one line for a person; mlx-lm lists every missing tensor.
_REASON_CHARS = 600

# More than one, so that the prefill kernels are compiled too where a backend compiles at first use.
_WARM_UP_TOKENS = 2


class LoadError(Exception):
    """The model can't be loaded; the message is for a person and names file, tensor or type."""


def backend() -> Backend:
    """The backend MLX runs on in this process."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def set_memory_limits(limit_bytes: int, reserve_bytes: int = 0) -> None:
    """Tell MLX its share. reserve_bytes: what it may keep of freed buffers, 0 for the usual. Wiring memory
    exists on Metal only."""
    mx.set_memory_limit(limit_bytes)
    mx.set_cache_limit(reserve_bytes or min(_CACHE_LIMIT_BYTES, limit_bytes // 8))
    if backend() == "metal":
        recommended = mx.device_info().get("max_recommended_working_set_size", limit_bytes)
        mx.set_wired_limit(min(limit_bytes, int(recommended)))


def load(folder: Path, progress: Callable[[int, int], None]) -> Loaded:
    """The model in `folder`, evaluated and warmed up by one small forward pass.

    progress(done, total): bytes of weights in memory. Raises LoadError.
    """
    try:
        found = checkpoint.read(folder)
    except checkpoint.CheckpointError as err:
        raise LoadError(str(err)) from err
    own_code = found.config.get("model_file")
    if own_code is not None:
        raise LoadError(f"config.json wants {own_code!r} of the folder run as code, which is never done here")
    with reasons(found.model_type):
        model, _ = load_model(folder, lazy=True)
        if backend() == "cpu":
            to_float32(model)
            cpu_attention.install()
        return warmed_up(model, evaluate(model, progress), found)


def warmed_up(model: Any, weights_bytes: int, files: ModelFiles, stream: Stream | None = None) -> Loaded:
    """What the engine is given of an evaluated model, after one small pass. stream: of its experts."""
    held = [value.dtype for _, value in tree_flatten(model.parameters())]
    dtypes = [dtype for dtype in held if mx.issubdtype(dtype, mx.floating)] or held

    def make_cache() -> list[Any]:
        return list(make_prompt_cache(model))

    kv, logits_width = _warm_up(model, make_cache())
    return Loaded(
        model=model,
        make_cache=make_cache,
        kv=kv,
        weights_bytes=weights_bytes,
        dtype=str(max(set(dtypes), key=dtypes.count)).removeprefix("mlx.core."),
        logits_width=logits_width,
        files=files,
        cache_classes=dict(Counter(type(cache).__name__ for cache in _flat(make_cache()))),
        stream=stream,
    )


@contextlib.contextmanager
def reasons(model_type: str) -> Iterator[None]:
    """What mlx-lm and MLX raise while a model is built, as a LoadError that says where to look."""
    try:
        yield
    except Exception as err:
        text = " ".join(str(err).split()) or type(err).__name__
        if isinstance(err, KeyError | TypeError | AttributeError):
            text = f"config.json does not describe a whole {model_type} model: {type(err).__name__}: {text}"
        elif text.startswith("Model type"):
            text = f"config.json: mlx-lm knows no architecture {model_type!r}"
        elif text.startswith(("Expected shape", "Missing", "Received")):
            text = f"the weights do not fit config.json: {text}"
        if len(text) > _REASON_CHARS:
            text = text[:_REASON_CHARS] + "…"
        raise LoadError(text) from err


def to_float32(model: nn.Module) -> None:
    """Every floating weight as float32, quantised ones dequantised; all of it lazy."""
    for _, module in model.named_modules():
        if "scales" in module and module["scales"].dtype in (mx.float16, mx.bfloat16):
            # Dequantising in 16 bits would round what the folder says exactly.
            for name in ("scales", "biases"):
                if module.get(name) is not None:
                    module[name] = module[name].astype(mx.float32)
    dequantize_model(model)
    narrow = [
        (name, value.astype(mx.float32))
        for name, value in tree_flatten(model.parameters())
        if value.dtype in (mx.float16, mx.bfloat16)
    ]
    model.update(tree_unflatten(narrow))


def evaluate(model: nn.Module, progress: Callable[[int, int], None]) -> int:
    """Read the weights group by group; returns their bytes."""
    weights = [value for _, value in tree_flatten(model.parameters())]
    total: int = sum(value.nbytes for value in weights)
    done, group, group_bytes = 0, [], 0
    progress(0, total)
    for place, value in enumerate(weights, 1):
        group.append(value)
        group_bytes += value.nbytes
        if group_bytes >= _GROUP_BYTES or place == len(weights):
            mx.eval(group)
            done += group_bytes
            progress(done, total)
            group, group_bytes = [], 0
    return total


def _warm_up(model: Any, cache: list[Any]) -> tuple[KvCost, int]:
    """One small forward pass: what its caches hold is what every row's will, and how wide its logits are."""
    tokens = mx.zeros((1, _WARM_UP_TOKENS), dtype=mx.uint32)
    logits = model(tokens, cache=cache)
    mx.eval(logits, [layer.state for layer in cache])
    cost = _kv_cost(cache)
    mx.clear_cache()
    return cost, logits.shape[-1]


def _kv_cost(caches: list[Any]) -> KvCost:
    """What one row's caches take, read off caches that hold something; equal windows are added up."""
    bytes_per_token: dict[int | None, int] = {}
    fixed_bytes = 0
    for cache in _flat(caches):
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if keys is None:
            fixed_bytes += cache.nbytes
            continue
        parts = [part for held in (keys, values) for part in (held if isinstance(held, tuple) else (held,))]
        window = getattr(cache, "max_size", None)
        per_token = sum(part.nbytes // part.shape[2] for part in parts)
        bytes_per_token[window] = bytes_per_token.get(window, 0) + per_token
    layers = tuple(LayerKv(size, window) for window, size in bytes_per_token.items())
    return KvCost(layers, fixed_bytes)


def _flat(caches: list[Any]) -> Iterator[Any]:
    """Caches with those that hold several (CacheList) taken apart."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _flat(list(cache.caches))
        else:
            yield cache


def load_tokenizer(folder: Path) -> ChatTokenizer:
    """The folder's tokenizer.json, or what transformers makes of an older format where there is none.

    Raises ChatTokenizerError, or LoadError when no tokenizer can be made.
    """
    if (folder / "tokenizer.json").is_file():
        return ChatTokenizer.open(folder)
    with _without_torch():
        try:
            from transformers import AutoTokenizer

            converted = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=False, local_files_only=True
            )
            return ChatTokenizer.with_tokenizer(folder, converted.backend_tokenizer)
        except Exception as err:
            raise LoadError(
                "the folder has no tokenizer.json, and no older tokenizer (tokenizer.model, vocab.json with "
                "merges.txt, …) that transformers can convert"
            ) from err


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """transformers imports torch where it finds it: 2 s and 190 MB that no worker needs."""
    missing = object()
    held: Any = sys.modules.get("torch", missing)
    if held is missing:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if held is missing:
            del sys.modules["torch"]
