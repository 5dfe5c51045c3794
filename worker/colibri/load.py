"""A model of an artifact, without its routed experts: those are for an ExpertStream to put in place.

Every other tensor is there, strictly: one that lacks, one too many or one of another shape is named. Nothing
has been read yet when `build` returns: parameters are lazy, to be evaluated in groups by whoever shows the
progress of loading. Code that a folder brings along is never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes, infer_quant_config

from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import geometry
from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, Place
from mlxpool.worker.colibri import dense
from mlxpool.worker.colibri.model import Model, arguments

MODEL_TYPE = "glm_moe_dsa"

# A container's scales stand beside the tensor they belong to.
_SCALES_SUFFIX = ".qs"
_KV = "self_attn.kv_b_proj.weight"

Tensors = dict[str, mx.array]


class Absent(nn.Module):  # type: ignore[misc]  # mlx has no types here
    """Where a layer's routed experts belong. activation: what stands between their projections."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation

    def __call__(self, *_: Any) -> mx.array:
        raise RuntimeError("a model was called before its experts were put in place")


def build(artifact: Artifact, backend: Backend) -> nn.Module:
    """The model, its experts Absent, its weights lazy. Raises CheckpointError."""
    config = artifact.config
    if config.get("model_file") is not None:
        raise CheckpointError(
            f"config.json wants {config['model_file']!r} of the folder run as code, which is never done here"
        )
    if artifact.model_type == MODEL_TYPE:
        model: nn.Module = Model(arguments(config, artifact.has_indexer))
        tensors = _read(artifact, artifact.dense)
        if artifact.form != "container":
            tensors = model.sanitize(tensors)
    else:
        model, tensors = _of_another_family(artifact)
    for layout in artifact.layers:
        clear(model, layout)
    _fill(model, tensors, artifact, backend)
    return model


def fill_draft(module: nn.Module, model: Model, artifact: Artifact, backend: Backend) -> None:
    """Give the draft layer of `model` its tensors, lazy. module: its tree has their names below the layer's
    own, but for the routed experts. Raises CheckpointError.
    """
    prefix = f"model.layers.{model.args.num_hidden_layers}."
    tensors = _read(artifact, artifact.mtp_dense)
    if artifact.form != "container":
        # mlx-lm's class would drop it; it is given as a layer that is kept.
        kept = "model.layers.0."
        renamed = {kept + name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        prefix, tensors = kept, model.sanitize(renamed)
    _fill(module, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}, artifact, backend)


def _of_another_family(artifact: Artifact) -> tuple[nn.Module, Tensors]:
    """A model of mlx-lm's own class and its tensors, the experts' left out.

    All are looked at, because some classes rename the others only where they find experts to stack. That
    reads nothing.
    """
    kind, kind_args = _get_classes(artifact.config)
    model: nn.Module = kind(kind_args.from_dict(artifact.config))
    tensors: Tensors = {}
    if artifact.form == "records":
        return model, _read(artifact, artifact.dense)
    for file in artifact.files:
        tensors |= _tensors(artifact, file)
    if hasattr(model, "sanitize"):
        tensors = model.sanitize(tensors)
    experts = tuple(f"{layout.module}." for layout in artifact.layers)
    return model, {name: tensor for name, tensor in tensors.items() if not name.startswith(experts)}


def _tensors(artifact: Artifact, file: str) -> Tensors:
    """All of a file's, lazy."""
    held: Any = mx.load(str(Path(artifact.folder, file)))
    return dict(held)


def _read(artifact: Artifact, places: Mapping[str, Place]) -> Tensors:
    """Lazy tensors of these names."""
    found: Tensors = {}
    for file in sorted({place.file for place in places.values()}):
        held = _tensors(artifact, file)
        found |= {name: held[name] for name, place in places.items() if place.file == file}
    return found


def _fill(module: nn.Module, tensors: Tensors, artifact: Artifact, backend: Backend) -> None:
    """Give a module its tensors, in modules that hold them as they are packed."""
    quantization = _quantization(artifact.config)
    if artifact.form == "container":
        tensors = _unpacked(module, tensors, backend)
    elif quantization is not None:
        _quantise(module, tensors, quantization)
    elif backend == "cpu":
        # Its kernels for 16 bits are scalar, and its gathered product knows float32 only.
        tensors = {name: _widened(tensor) for name, tensor in tensors.items()}
    _check(module, tensors)
    module.update(tree_unflatten(list(tensors.items())))
    module.eval()


def _unpacked(module: nn.Module, tensors: Tensors, backend: Backend) -> Tensors:
    """Tensors of a container by the names of modules that hold them, which take their places in the tree."""
    constants = dense.Constants()
    made: Tensors = {}
    # The largest first, as the constants want it.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        path, scales = name.removesuffix(".weight"), tensors.get(name + _SCALES_SUFFIX)
        if name.endswith(_KV) and _is_in(module, path):
            made |= _keys_and_values(module, name, tensor, scales, constants, backend)
        elif scales is not None and _is_in(module, path):
            old = module_at(module, path)
            outputs, inputs = old.weight.shape
            how = dense.packing(name, (outputs, inputs), tensor, scales, backend)
            kind = dense.PackedEmbedding if isinstance(old, nn.Embedding) else dense.PackedLinear
            put(module, path, kind(how, constants, (outputs, inputs)))
            held = dense.parts(tensor, scales, how, outputs, inputs)
            made |= {f"{path}.{part}": each for part, each in held.items()}
        elif name.removesuffix(_SCALES_SUFFIX) == name or name.removesuffix(_SCALES_SUFFIX) not in tensors:
            made[name] = tensor
    return made


def _keys_and_values(
    module: nn.Module,
    name: str,
    tensor: mx.array,
    scales: mx.array | None,
    constants: dense.Constants,
    backend: Backend,
) -> Tensors:
    """A kv_b_proj as `embed_q` and `unembed_out`."""
    attention = module_at(module, parent := name.removesuffix(".kv_b_proj.weight"))
    heads, latent, keys = attention.embed_q.weight.shape
    values = attention.unembed_out.weight.shape[1]
    outputs = heads * (keys + values)
    if scales is None:
        by_head = tensor.reshape(heads, keys + values, latent)
        return {
            f"{parent}.embed_q.weight": mx.contiguous(by_head[:, :keys].swapaxes(1, 2)),
            f"{parent}.unembed_out.weight": mx.contiguous(by_head[:, keys:]),
        }
    how = dense.packing(name, (outputs, latent), tensor, scales, backend)
    attention.embed_q = dense.PackedMultiLinear(how, constants, (heads, keys, latent), flipped=True)
    attention.unembed_out = dense.PackedMultiLinear(how, constants, (heads, values, latent), flipped=False)
    halves = dense.halves(dense.parts(tensor, scales, how, outputs, latent), heads, keys)
    return {
        f"{parent}.{place}.{part}": each
        for place, half in zip(("embed_q", "unembed_out"), halves, strict=True)
        for part, each in half.items()
    }


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How MLX packed the weights; None where it didn't. Raises CheckpointError."""
    for key in ("quantization", "quantization_config"):
        said = config.get(key)
        # Published checkpoints have others' quantization_config, of weights that are none of MLX's.
        if isinstance(said, dict) and (key == "quantization" or "quant_method" not in said):
            for name in ("group_size", "bits"):
                geometry.number(said, name)
            return said
    return None


def _quantise(module: nn.Module, tensors: Tensors, quantization: Mapping[str, Any]) -> None:
    """Put in modules that hold what config.json's `quantization`, and else the tensors' shapes, say."""

    def how(path: str, found: nn.Module) -> Any:
        if path in quantization:
            return quantization[path]
        if not hasattr(found, "to_quantized") or f"{path}.scales" not in tensors:
            return False
        return infer_quant_config(path, found, tensors)

    nn.quantize(
        module,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=how,
    )


def _check(module: nn.Module, tensors: Tensors) -> None:
    """Raises CheckpointError unless these are just the module's parameters."""
    wanted = dict(tree_flatten(module.parameters()))
    for what, names in (
        ("lacks", sorted(wanted.keys() - tensors.keys())),
        ("has no place for", sorted(tensors.keys() - wanted.keys())),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"the weights do not fit config.json: the model {what} {names[0]!r}{more}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"the weights do not fit config.json: {name!r} is of shape {list(tensor.shape)} where the "
                f"model has {list(wanted[name].shape)}"
            )


def _widened(tensor: mx.array) -> mx.array:
    return tensor.astype(mx.float32) if tensor.dtype in (mx.float16, mx.bfloat16) else tensor


def _is_in(module: nn.Module, path: str) -> bool:
    """Whether there is such a module, for kv_b_proj the attention that it is part of."""
    try:
        module_at(module, path.removesuffix(".kv_b_proj"))
    except (AttributeError, KeyError, IndexError, ValueError):
        return False
    return True


def clear(model: nn.Module, layout: ExpertLayout) -> None:
    """Put Absent where the layer's experts belong. Raises CheckpointError where there is no such place."""
    try:
        found = module_at(model, layout.module)
        put(model, layout.module, Absent(found.activation))
    except (AttributeError, KeyError, IndexError, ValueError, TypeError):
        raise CheckpointError(
            f"layer {layout.layer}: this architecture has no experts to stream at {layout.module!r}"
        ) from None


def module_at(model: nn.Module, path: str) -> Any:
    """The module at a path such as "model.layers.3.mlp.switch_mlp"."""
    found: Any = model
    for step in path.split("."):
        found = found[int(step)] if isinstance(found, list) else getattr(found, step)
    return found


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(module_at(model, parent) if parent else model, name, module)
