"""Importing: a GGUF file made into a model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxpool.shared.gguf import parts
from mlxpool.shared.gguf.header import GgufError
from mlxpool.shared.gguf.plan import Dtype, plan
from mlxpool.shared.job_tasks import ImportTask

from . import estimates, names
from .computing import task_argv
from .kind import Fault, Here, Needs, source


class ImportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What is imported."""

    file: Annotated[
        str,
        Meta(description="A GGUF file; of one in parts (-00001-of-0000N.gguf) any part."),
        source("file"),
    ]
    name: Annotated[str | None, Meta(description="The model's name; else made of the file's.")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "native"],
        Meta(
            description="Type of the weights. native keeps Q4_0, Q4_1 and Q8_0 quantised; auto is float32 "
            "where the CPU computes, else bfloat16."
        ),
    ] = "auto"


class Import:
    """Kind "import"."""

    name = "import"
    summary = "Make a GGUF file a model."
    gpu = False
    positional = ("file",)
    config = ImportConfig

    def faults(self, config: ImportConfig, here: Here) -> list[Fault]:
        faults = names.new_model_faults(_name(config), here)
        file = names.find_file(config.file, "file")
        if isinstance(file, Fault):
            return [*faults, file]
        try:
            planned = plan(parts.read_all(file, with_long_lists=False), _dtype(config, here))
        except GgufError as problem:
            return [*faults, Fault("file", str(problem))]
        return faults or estimates.room_faults(names.models_folder(here), planned.weights_bytes)

    def needs(self, _config: ImportConfig, _here: Here) -> Needs:
        """Nothing: it takes memory for some rows."""
        return Needs()

    def argv(self, config: ImportConfig, here: Here) -> list[str]:
        task = ImportTask(
            file=config.file,
            models=str(names.models_folder(here).absolute()),
            name=_name(config),
            dtype=_dtype(config, here),
        )
        return task_argv("mlxpool.worker.jobs", "import_", task=task)

    def env(self, _config: ImportConfig, _here: Here) -> Mapping[str, str]:
        return {}


def _name(config: ImportConfig) -> str:
    return parts.stem(Path(config.file)) if config.name is None else config.name


def _dtype(config: ImportConfig, here: Here) -> Dtype:
    if config.dtype != "auto":
        return config.dtype
    # There 16-bit kernels are scalar.
    return "float32" if here.backend in ("cpu", "none") else "bfloat16"
