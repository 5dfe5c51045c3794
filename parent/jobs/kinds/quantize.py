"""Quantising: a model with fewer bits per weight."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxpool.parent.library import LibraryModel
from mlxpool.shared import quantisation
from mlxpool.shared.checkpoint import Checkpoint
from mlxpool.shared.job_tasks import QuantizeTask
from mlxpool.shared.text import cut

from . import estimates, names
from .computing import Computing
from .kind import Fault, Here, Needs, source

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPE_BITS: dict[Dtype, int] = {"float32": 32, "float16": 16, "bfloat16": 16}
# How many widths an error lists.
_NAMED_WIDTHS = 6


class QuantizeConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What is quantised, and how."""

    model: Annotated[str, Meta(description="The model to quantise."), source("model")]
    bits: Annotated[
        Literal[2, 3, 4, 5, 6, 8] | None,
        Meta(description="Bits of a weight; 4 where neither a recipe nor a target says otherwise."),
    ] = None
    group_size: Annotated[
        Literal[16, 32, 64, 128] | None,
        Meta(description="Weights that share a scale; 64 in mode affine, fixed in the others."),
    ] = None
    mode: Annotated[
        Literal["affine", "mxfp4", "nvfp4", "mxfp8"],
        Meta(description="The format: affine takes any bits, the others are 4 or 8 bits wide."),
    ] = "affine"
    recipe: Annotated[
        Literal["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"] | None,
        Meta(description="A mix in place of bits: the higher number for sensitive layers."),
    ] = None
    target_bpw: Annotated[
        Annotated[float, Meta(ge=2, le=16)] | None,
        Meta(description="Bits per weight of the whole model, met by choosing each layer's."),
    ] = None
    dtype: Annotated[
        Dtype | None, Meta(description="Type of what stays unquantised; else as it is stored.")
    ] = None
    name: Annotated[
        str | None, Meta(description="The new model's name; else made of the model's and the bits.")
    ] = None


class Quantize(Computing):
    """Kind "quantize"."""

    name = "quantize"
    summary = "Make a copy of a model with fewer bits per weight."
    positional = ("model",)
    config = QuantizeConfig

    def faults(self, config: QuantizeConfig, here: Here) -> list[Fault]:
        faults = _combination_faults(config)
        model = names.find_model(config.model, here.library)
        if isinstance(model, Fault):
            return [*faults, model]
        faults += names.new_model_faults(_name(config, model), here)
        found = names.read_model(model)
        if isinstance(found, Fault):
            return [*faults, found]
        if estimates.is_quantised(found):
            faults.append(
                Fault("model", f"{model.name} is quantised already; quantise what it was made from")
            )
        elif not faults:
            faults += layer_faults(config, found)
        if not faults:
            faults += estimates.room_faults(names.models_folder(here), _result_bytes(config, found))
        return faults

    def needs(self, config: QuantizeConfig, here: Here) -> Needs:
        """Memory: one file of results, the largest tensor thrice, and the process."""
        found = names.find_checkpoint(config.model, here.library)
        if isinstance(found, Fault):
            return Needs(gpu=True)
        return Needs(
            gpu=True,
            memory_bytes=estimates.rewriting_bytes(found, here.backend, _result_bytes(config, found)),
        )

    def argv(self, config: QuantizeConfig, here: Here) -> list[str]:
        model = here.library.resolve(config.model)
        task = QuantizeTask(
            model=model.name,
            folder=str(model.path.absolute()),
            models=str(names.models_folder(here).absolute()),
            name=_name(config, model),
            group_size=_group_size(config),
            mode=config.mode,
            bits=_bits(config),
            recipe=config.recipe,
            target_bpw=config.target_bpw,
            dtype=config.dtype,
        )
        return self.command(task)


def _bits(config: QuantizeConfig) -> int | None:
    """None where a recipe or a target decides."""
    if config.mode in quantisation.FIXED_MODES:
        return quantisation.FIXED_MODES[config.mode][1]
    if config.recipe is not None or config.target_bpw is not None:
        return None
    return config.bits or quantisation.DEFAULT_BITS


def _group_size(config: QuantizeConfig) -> int:
    if config.mode in quantisation.FIXED_MODES:
        return quantisation.FIXED_MODES[config.mode][0]
    return config.group_size or quantisation.DEFAULT_GROUP_SIZE


def _name(config: QuantizeConfig, model: LibraryModel) -> str:
    if config.name is not None:
        return config.name
    how = config.recipe or (f"{config.target_bpw:g}bpw" if config.target_bpw is not None else None)
    if how is None:
        how = config.mode if config.mode != "affine" else f"{_bits(config)}bit"
    return f"{names.last_part(model.name)}-{how}"


def _combination_faults(config: QuantizeConfig) -> list[Fault]:
    """Fields that exclude each other."""
    faults: list[Fault] = []
    ways = [field for field in ("bits", "recipe", "target_bpw") if getattr(config, field) is not None]
    faults += [
        Fault(field, f"{field} and {ways[0]} both say how many bits a layer gets; give one of them")
        for field in ways[1:]
    ]
    if config.mode in quantisation.FIXED_MODES:
        group_size, bits = quantisation.FIXED_MODES[config.mode]
        fixed = f"mode {config.mode} has {bits} bits in groups of {group_size}"
        if config.bits not in (None, bits):
            faults.append(Fault("bits", f"{config.bits}, but {fixed}; leave it out, or use mode affine"))
        if config.group_size not in (None, group_size):
            faults.append(
                Fault("group_size", f"{config.group_size}, but {fixed}; leave it out, or use mode affine")
            )
        faults += [
            Fault(field, f"{fixed}, and no {field}; use mode affine") for field in ways if field != "bits"
        ]
    elif config.group_size == 16:
        faults.append(Fault("group_size", "16 is nvfp4's alone; mode affine takes 32, 64 or 128"))
    return faults


def layer_faults(config: QuantizeConfig, found: Checkpoint) -> list[Fault]:
    """What the model's shapes do not allow."""
    group_size = _group_size(config)
    widths = sorted({layer.width for layer in estimates.layers_of(found)})
    if not any(width % group_size == 0 for width in widths):
        has = ", ".join(map(str, widths[:_NAMED_WIDTHS])) or "none"
        return [Fault("group_size", f"{group_size} divides no layer's width of this model (they are {has})")]
    if config.recipe is not None and not any("down_proj" in name for name in found.tensors):
        why = f"{config.recipe} is made for models with down_proj layers, which this one has not"
        return [Fault("recipe", f"{why}; use bits or target_bpw")]
    if config.target_bpw is None:
        return []
    fewest, most = estimates.fewest_and_most_bpw(
        found, group_size, None if config.dtype is None else DTYPE_BITS[config.dtype]
    )
    if not fewest - quantisation.TOLERANCE_BPW <= config.target_bpw <= most + quantisation.TOLERANCE_BPW:
        reach = f"this model can have {fewest:.2f} to {most:.2f} in groups of {group_size}"
        return [Fault("target_bpw", f"{cut(f'{config.target_bpw:g}')} can't be met: {reach}")]
    return []


def _result_bytes(config: QuantizeConfig, found: Checkpoint) -> int:
    if config.target_bpw is not None:
        return int(config.target_bpw * sum(tensor.elements for tensor in found.tensors.values()) / 8)
    bits = estimates.mean_bits(config.recipe) if config.recipe is not None else float(_bits(config) or 0)
    dtype_bits = None if config.dtype is None else DTYPE_BITS[config.dtype]
    return estimates.quantised_bytes(found, bits, config.mode, _group_size(config), dtype_bits)
