"""Converting: a mixture of experts made into records, each expert one read."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxpool.parent.library import LibraryModel
from mlxpool.shared import checkpoint, quantisation
from mlxpool.shared.checkpoint import Checkpoint
from mlxpool.shared.colibri.folder import is_container, is_records
from mlxpool.shared.job_tasks import ColibriConvertTask
from mlxpool.shared.memory import OVERHEAD_BYTES

from . import estimates, names
from .computing import Computing, task_argv
from .kind import Fault, Here, Needs, source

# Experts that are read ahead, and one on its way through (worker/colibri/convert/writing.py).
_EXPERTS_BYTES = 512 * 2**20
# A dense tensor as it is read, and packed: half as much at most, as an array and as bytes.
_DENSE_COPIES = 2


class ColibriConvertConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What is converted, and how."""

    model: Annotated[str, Meta(description="The model to convert: a mixture of experts."), source("model")]
    bits: Annotated[
        Literal["4", "8", "none"] | None,
        Meta(
            description="Bits of a weight, or none to leave weights as they are. Unset: 4, and as they are "
            "where the model is quantised already."
        ),
    ] = None
    group_size: Annotated[
        Literal[32, 64, 128] | None,
        Meta(description="Weights that share a scale; 64 in mode affine, 32 in mxfp4."),
    ] = None
    mode: Annotated[Literal["affine", "mxfp4"], Meta(description="The format of what is packed.")] = "affine"
    verify: Annotated[bool, Meta(description="Read everything again at the end.")] = True
    name: Annotated[str | None, Meta(description="The new model's name; else made of the model's.")] = None


class ColibriConvert(Computing):
    """Kind "colibri-convert"."""

    name = "colibri-convert"
    summary = "Make a mixture of experts a model whose experts are read from disk as they are needed."
    positional = ("model",)
    config = ColibriConvertConfig

    def faults(self, config: ColibriConvertConfig, here: Here) -> list[Fault]:
        """What the headers say of each expert is for the process to find: it takes seconds."""
        faults = combination_faults(config)
        model = names.find_model(config.model, here.library)
        if isinstance(model, Fault):
            return [*faults, model]
        faults += names.new_model_faults(_name(config, model), here)
        found = _read(model)
        if isinstance(found, Fault):
            return [*faults, found]
        if not any(".experts." in name or ".switch_mlp." in name for name in found.tensors):
            faults.append(Fault("model", f"{model.name} has no routed experts; it is no mixture of experts"))
        if is_packed(found) and config.bits not in (None, "none"):
            faults.append(
                Fault(
                    "bits",
                    f"{model.name} is quantised already, and its weights stay as they are; leave it out",
                )
            )
        if not faults:
            faults += estimates.room_faults(names.models_folder(here), _result_bytes(config, found))
        return faults

    def needs(self, config: ColibriConvertConfig, here: Here) -> Needs:
        """Memory: some experts, the largest other tensor, and the process."""
        model = names.find_model(config.model, here.library)
        found = model if isinstance(model, Fault) else _read(model)
        if isinstance(found, Fault):
            return Needs(gpu=True)
        largest = max(
            (tensor.size_bytes for tensor in found.tensors.values() if len(tensor.shape) < 3), default=0
        )
        overhead = OVERHEAD_BYTES[here.backend]
        return Needs(gpu=True, memory_bytes=overhead + _EXPERTS_BYTES + _DENSE_COPIES * largest)

    def argv(self, config: ColibriConvertConfig, here: Here) -> list[str]:
        model = here.library.resolve(config.model)
        target = names.models_folder(here).absolute() / _name(config, model)
        return self.command(make_task(config, str(model.path.absolute()), str(target)))

    def command(self, task: msgspec.Struct) -> list[str]:
        """As of the others, but for the module's name."""
        return process_argv(task)


def process_argv(task: msgspec.Struct) -> list[str]:
    """The process for a task, also for a command without a server."""
    return task_argv("mlxpool.worker.jobs", "colibri_convert", task=task)


def make_task(config: ColibriConvertConfig, folder: str, target: str) -> ColibriConvertTask:
    """What the process is handed. folder, target: absolute."""
    if config.mode in quantisation.FIXED_MODES:
        group_size, bits = quantisation.FIXED_MODES[config.mode]
    else:
        group_size = config.group_size or quantisation.DEFAULT_GROUP_SIZE
        bits = 8 if config.bits == "8" else quantisation.DEFAULT_BITS
    return ColibriConvertTask(
        folder=folder,
        target=target,
        bits=None if config.bits == "none" else bits,
        group_size=0 if config.bits == "none" else group_size,
        mode="affine" if config.bits == "none" else config.mode,
        given=config.bits is not None or config.mode != "affine" or config.group_size is not None,
        verify=config.verify,
    )


def combination_faults(config: ColibriConvertConfig) -> list[Fault]:
    """Fields that exclude each other."""
    faults: list[Fault] = []
    if config.bits == "none":
        if config.group_size is not None:
            faults.append(
                Fault(
                    "group_size", f"{config.group_size}, but nothing is packed with bits none; leave it out"
                )
            )
        if config.mode != "affine":
            faults.append(Fault("mode", f"{config.mode}, but nothing is packed with bits none; leave it out"))
    elif config.mode in quantisation.FIXED_MODES:
        group_size, bits = quantisation.FIXED_MODES[config.mode]
        fixed = f"mode {config.mode} has {bits} bits in groups of {group_size}"
        if config.bits not in (None, str(bits)):
            faults.append(Fault("bits", f"{config.bits}, but {fixed}; leave it out, or use mode affine"))
        if config.group_size not in (None, group_size):
            faults.append(
                Fault("group_size", f"{config.group_size}, but {fixed}; leave it out, or use mode affine")
            )
    return faults


def is_packed(found: Checkpoint) -> bool:
    """Whether MLX has quantised it. fp8 of the publisher's is not meant: that is converted."""
    return any(name.endswith(".scales") for name in found.tensors)


def _read(model: LibraryModel) -> Checkpoint | Fault:
    """What the model's files say, also where it can't be held in memory."""
    if is_records(model.path) or is_container(model.path):
        return Fault("model", f"{model.name} is served as it is; there is nothing to convert")
    try:
        return checkpoint.read(model.path)
    except checkpoint.CheckpointError as problem:
        return Fault("model", f"{model.name} can't be read: {problem}")


def _name(config: ColibriConvertConfig, model: LibraryModel) -> str:
    return config.name if config.name is not None else f"{names.last_part(model.name)}-records"


def _result_bytes(config: ColibriConvertConfig, found: Checkpoint) -> int:
    if is_packed(found):
        return found.weights_bytes
    task = make_task(config, "", "")
    if task.bits is None:
        # fp8 becomes twice as wide.
        return sum(
            tensor.size_bytes * (2 if tensor.dtype == "F8_E4M3" else 1) for tensor in found.tensors.values()
        )
    return estimates.quantised_bytes(found, task.bits, config.mode, task.group_size, 16)
