"""Everything that is no expert's: named and packed as mlx-lm's own conversion would.

mlx-lm's class of the architecture renames and rearranges (`sanitize`), says which modules can be packed and
which of them should be. It gets experts of a few numbers each in place of the real ones, because some classes
only rearrange where experts are there. What it makes of those shows whether it understands the files as
`source` does (some architectures' experts are transposed, or gate and up lie row by row); then it is dropped.
All of this is lazy: a tensor is read when its file is written.

The draft layer, which mlx-lm drops, is treated by its names, and packed in 8 bits where the model is packed:
drafts of a 4-bit one are never accepted. Its copies of embedding and head are left out, for they are the
model's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU

from mlxpool.shared.colibri import families
from mlxpool.shared.colibri.records import Recipe

from .numbers import from_blocks, pack
from .source import Source, layer_of, tensor_of
from .terms import ConvertError

DRAFT_RECIPE = Recipe(bits=8, group_size=64, mode="affine")
_SHARED_WITH_MODEL = (".embed_tokens.weight", ".shared_head.head.weight")
_DRAFT_WHOLE = ("norm.weight", ".mlp.gate.weight")
_SCALES = "_scale_inv"
_SCALED = "weight_scale_inv"


class Dense(NamedTuple):
    """tensors: lazy, by name. quantization: config.json's, {} where nothing is packed. modules: the experts'
    paths in the model, by layer, where the class tells them."""

    tensors: dict[str, mx.array]
    quantization: dict[str, Any]
    modules: dict[int, str]


def draft_recipe(recipe: Recipe) -> Recipe:
    """Of the draft layer, where the model is packed by `recipe`."""
    return recipe if recipe.bits is None else DRAFT_RECIPE


def build(source: Source, recipe: Recipe, make_model: Callable[[Mapping[str, Any]], Any]) -> Dense:
    """Raises ConvertError."""
    loaded = _load(source)
    if source.quantised:
        said = source.config.get("quantization", source.config.get("quantization_config", {}))
        return Dense(loaded, dict(said), {})
    plain = _without_blocks(loaded)
    drafts = {name: plain.pop(name) for name in list(plain) if layer_of(name) >= source.draft_layer}
    model = make_model(source.config)
    modules = {
        layer_of(f"{path}."): path for path, module in model.named_modules() if isinstance(module, SwitchGLU)
    }
    tensors, overrides = _main(source, plain, recipe, model, modules)
    if source.mtp is not None:
        draft, draft_overrides = _draft(drafts, source, draft_recipe(recipe))
        tensors, overrides = {**tensors, **draft}, {**overrides, **draft_overrides}
    if recipe.bits is None:
        return Dense(tensors, {}, modules)
    rule = {"group_size": recipe.group_size, "bits": recipe.bits, "mode": recipe.mode}
    return Dense(tensors, {**rule, **overrides}, modules)


def _load(source: Source) -> dict[str, mx.array]:
    """Lazy, by the names of the file."""
    loaded: dict[str, mx.array] = {}
    for file in sorted({place.file for place in source.dense.values()}):
        try:
            arrays: dict[str, mx.array] = mx.load(str(source.folder / file))  # type: ignore[assignment]
        except (RuntimeError, ValueError) as problem:
            raise ConvertError(f"{file} can't be read: {' '.join(str(problem).split())}") from None
        loaded |= {name: array for name, array in arrays.items() if name in source.dense}
    return loaded


def _without_blocks(loaded: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Matrices of fp8 as bfloat16."""
    plain: dict[str, mx.array] = {}
    for name, array in loaded.items():
        if name.endswith(_SCALED):
            continue
        scales = loaded.get(f"{name}{_SCALES}")
        plain[name] = array if scales is None else from_blocks(array, scales)
    for name in loaded:
        if name.endswith(_SCALED) and name.removesuffix(_SCALES) not in loaded:
            raise ConvertError(f"{name} has no weight beside it")
    return plain


def _main(
    source: Source, plain: Mapping[str, mx.array], recipe: Recipe, model: Any, modules: Mapping[int, str]
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    for group in source.layers:
        if group.layer not in modules:
            raise ConvertError(f"layer {group.layer} has experts, which {_type(source)} does not have there")
    missing = sorted(set(modules) - {group.layer for group in source.layers})
    if missing:
        raise ConvertError(f"layer {missing[0]} has no experts in any file, and {_type(source)} wants them")
    stand_ins = _stand_ins(source)
    given = {**plain, **stand_ins}
    try:
        sanitized = model.sanitize(given) if hasattr(model, "sanitize") else given
    except (KeyError, ValueError, IndexError, AttributeError) as problem:
        raise ConvertError(
            f"the tensors are not those of {_type(source)}: {type(problem).__name__}: {problem}"
        ) from None
    _check_experts(source, stand_ins, sanitized, modules)
    of_experts = tuple(f"{path}." for path in modules.values())
    tensors = {
        name: array
        for name, array in sanitized.items()
        if not name.startswith(of_experts) and name not in source.expert_tensors
    }
    _check_names(source, tensors, model, of_experts)
    if recipe.bits is None:
        return tensors, {}
    return _packed(tensors, recipe, model)


def _type(source: Source) -> str:
    return str(source.config["model_type"])


def _stand_ins(source: Source) -> dict[str, mx.array]:
    """Of experts' tensors, as many axes and few numbers, by which each of a layer's is known."""
    made: dict[tuple[object, ...], mx.array] = {}
    found: dict[str, mx.array] = {}
    for name, shape in source.expert_tensors.items():
        said = tensor_of(name)
        if said is None or layer_of(name) >= source.draft_layer or name.endswith(_SCALED):
            continue
        mark = (said.projection, said.key, said.expert, len(shape))
        if mark not in made:
            # Four rows, of which halves and every other one are not the same.
            small = (4,) * len(shape) if said.expert is not None else (2,) + (4,) * (len(shape) - 1)
            made[mark] = mx.arange(math.prod(small), dtype=mx.float32).reshape(small) + 100 * len(made)
        found[name] = made[mark]
    return found


def _check_experts(
    source: Source,
    stand_ins: Mapping[str, mx.array],
    sanitized: Mapping[str, mx.array],
    modules: Mapping[int, str],
) -> None:
    """What the class makes of stand-ins is what their experts' places say."""
    parts: dict[str, Any] = {}
    for name, small in stand_ins.items():
        said = tensor_of(name)
        assert said is not None
        path = modules[layer_of(name)]
        if said.expert is not None:
            parts.setdefault(f"{path}.{said.projection}.{said.key}", {})[said.expert] = small
        elif said.projection == "gate_up":
            parts[f"{path}.gate_proj.{said.key}"], parts[f"{path}.up_proj.{said.key}"] = (
                small[:, :2],
                small[:, 2:],
            )
        else:
            parts[f"{path}.{said.projection}.{said.key}"] = small
    for name, array in sanitized.items():
        if name in source.expert_tensors or not name.startswith(
            tuple(f"{path}." for path in modules.values())
        ):
            continue
        part = parts.get(name)
        if isinstance(part, dict):
            part = mx.stack([part[expert] for expert in sorted(part)])
        if part is None or part.shape != array.shape or not mx.array_equal(part, array):
            raise ConvertError(
                f"{name}: a {_type(source)} keeps its experts in another way than is read here; make a "
                "checkpoint of MLX's of it (mlx_lm.convert), which can be streamed as it is"
            )


def _check_names(
    source: Source, tensors: Mapping[str, mx.array], model: Any, of_experts: tuple[str, ...]
) -> None:
    """Everything that the class wants is there, in its shape, and nothing else."""
    wanted = {
        name: value.shape
        for name, value in tree_flatten(model.parameters())
        if not name.startswith(of_experts)
    }
    for name in sorted({*wanted, *tensors}):
        if name not in tensors:
            raise ConvertError(f"{name} is in no file, and {_type(source)} wants it")
        if name not in wanted:
            raise ConvertError(f"{name} is no tensor of {_type(source)}")
        if tuple(wanted[name]) != tuple(tensors[name].shape):
            raise ConvertError(
                f"{name} is of shape {list(tensors[name].shape)}, and config.json wants {list(wanted[name])}"
            )


def _packed(
    tensors: Mapping[str, mx.array], recipe: Recipe, model: Any
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """As mlx_lm.utils.quantize_model decides, module by module; its overrides of the rule beside."""
    modules = dict(model.named_modules())
    predicate = getattr(model, "quant_predicate", None)
    made: dict[str, mx.array] = {}
    overrides: dict[str, Any] = {}
    for name, array in tensors.items():
        path, _, last = name.rpartition(".")
        module = modules.get(path)
        own: bool | dict[str, Any] = (
            last == "weight" and hasattr(module, "to_quantized") and array.shape[-1] % recipe.group_size == 0
        )
        if own and predicate is not None:
            own = predicate(path, module)
        if not own:
            made[name] = array
            continue
        chosen = recipe
        if isinstance(own, dict):
            overrides[path] = own
            chosen = Recipe(
                bits=own.get("bits", recipe.bits),
                group_size=own.get("group_size", recipe.group_size),
                mode=own.get("mode", recipe.mode),
            )
        made |= _named(path, array, chosen)
    return made, overrides


def _named(path: str, matrix: mx.array, recipe: Recipe) -> dict[str, mx.array]:
    parts = zip(("weight", "scales", "biases"), pack(matrix, recipe), strict=False)
    return {f"{path}.{part}": array for part, array in parts}


def _draft(
    given: Mapping[str, mx.array], source: Source, recipe: Recipe
) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The draft layer's own tensors, as the main layers have theirs."""
    split: dict[str, mx.array] = {}
    for name, array in given.items():
        if name.endswith(_SHARED_WITH_MODEL):
            continue
        if name.endswith(".kv_b_proj.weight"):
            split |= _halves(name.removesuffix(".kv_b_proj.weight"), array, source)
        else:
            split[name] = array
    made: dict[str, mx.array] = {}
    overrides: dict[str, Any] = {}
    for name, array in split.items():
        path, _, last = name.rpartition(".")
        fits = recipe.bits is not None and array.ndim > 1 and array.shape[-1] % recipe.group_size == 0
        if last != "weight" or name.endswith(_DRAFT_WHOLE) or not fits:
            made[name] = array
            continue
        overrides[path] = {"group_size": recipe.group_size, "bits": recipe.bits, "mode": recipe.mode}
        made |= _named(path, array, recipe)
    return made, overrides


def _halves(prefix: str, matrix: mx.array, source: Source) -> dict[str, mx.array]:
    """kv_b_proj [heads * (nope + value), latent] as mlx-lm's two: keys' transposed, values' as it is."""
    config = families.language(source.config)
    heads, nope, value = (
        config.get(key) for key in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim")
    )
    if not isinstance(heads, int) or not isinstance(nope, int) or not isinstance(value, int):
        raise ConvertError(f"{prefix}.kv_b_proj can't be split: config.json does not tell its heads")
    if matrix.shape[0] != heads * (nope + value):
        raise ConvertError(
            f"{prefix}.kv_b_proj has {matrix.shape[0]} rows; {heads} heads of {nope} and {value} are due"
        )
    each = matrix.reshape(heads, nope + value, -1)
    return {
        f"{prefix}.embed_q.weight": each[:, :nope].swapaxes(1, 2),
        f"{prefix}.unembed_out.weight": each[:, nope:],
    }
