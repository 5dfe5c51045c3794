"""Fusing: an adapter's weights put into a copy of its model."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from mlxpool.parent.library import LibraryModel
from mlxpool.shared.checkpoint import Checkpoint, CheckpointError
from mlxpool.shared.job_tasks import FuseTask, Trained
from mlxpool.shared.model_facts import model_facts

from . import estimates, names
from .computing import Computing
from .kind import Fault, Here, Needs, source


class FuseConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What is fused into what."""

    model: Annotated[str, Meta(description="The model that the adapter belongs to."), source("model")]
    adapter: Annotated[str, Meta(description="The adapter."), source("adapter")]
    name: Annotated[
        str | None, Meta(description="The new model's name; else made of the model's and the adapter's.")
    ] = None
    dequantize: Annotated[bool, Meta(description="Write full weights where the model's are quantised.")] = (
        False
    )


class Fuse(Computing):
    """Kind "fuse"."""

    name = "fuse"
    summary = "Make a model of a model and an adapter."
    positional = ("model", "adapter")
    config = FuseConfig

    def faults(self, config: FuseConfig, here: Here) -> list[Fault]:
        model = names.find_model(config.model, here.library)
        found = model if isinstance(model, Fault) else names.read_model(model)
        faults = [found] if isinstance(found, Fault) else []
        trained = names.find_adapter(config.adapter, None if isinstance(found, Fault) else found, here)
        if isinstance(trained, Fault):
            faults.append(trained)
        if isinstance(model, Fault):
            return faults
        faults += names.new_model_faults(_name(config, model), here)
        if isinstance(found, Fault):
            return faults
        if config.dequantize and not estimates.is_quantised(found):
            faults.append(Fault("dequantize", f"{model.name} is not quantised; leave it out"))
        if not faults:
            faults += estimates.room_faults(names.models_folder(here), _result_bytes(config, found))
        return faults

    def needs(self, config: FuseConfig, here: Here) -> Needs:
        """Memory: one file of results, the largest tensor thrice, and the process."""
        found = names.find_checkpoint(config.model, here.library)
        if isinstance(found, Fault):
            return Needs(gpu=True)
        return Needs(
            gpu=True,
            memory_bytes=estimates.rewriting_bytes(found, here.backend, _result_bytes(config, found)),
        )

    def argv(self, config: FuseConfig, here: Here) -> list[str]:
        model = here.library.resolve(config.model)
        task = FuseTask(
            model=model.name,
            folder=str(model.path.absolute()),
            models=str(names.models_folder(here).absolute()),
            name=_name(config, model),
            adapter=Trained(config.adapter, str((names.adapters_folder(here) / config.adapter).absolute())),
            dequantize=config.dequantize,
        )
        return self.command(task)


def _name(config: FuseConfig, model: LibraryModel) -> str:
    return config.name if config.name is not None else f"{names.last_part(model.name)}-{config.adapter}"


def _result_bytes(config: FuseConfig, found: Checkpoint) -> int:
    """Full weights have the type of the packed ones' scales."""
    if not config.dequantize:
        return found.weights_bytes
    try:
        facts = model_facts(found)
    except CheckpointError:
        return found.weights_bytes  # the process says so
    return facts.weights_float32_bytes * facts.float_bytes // 4
