"""Datasets: training lines that a model of this server writes about a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from mlxpool.parent.jobs.dataset import records, templates
from mlxpool.parent.jobs.dataset.task import KEY_VARIABLE, DatasetTask
from mlxpool.parent.jobs.dataset.templates import TEMPLATES, Template

from . import names
from .computing import task_argv
from .kind import Fault, Here, Needs, source

# They travel on a command line, which holds 128 KiB of one argument.
MAX_PROMPT_CHARS = 6_000
_Prompt = Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT_CHARS)]
_DEFAULT_TEMPLATE: templates.Name = "qa"


class DatasetConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What is asked about what, and of whom."""

    model: Annotated[str, Meta(description="The model that writes."), source("model")]
    input: Annotated[
        str,
        Meta(description="A text, cut into passages on paragraph borders, or a .jsonl file of objects."),
        source("file"),
    ]
    template: Annotated[
        templates.Name | None,
        Meta(description="What is asked about a passage; qa where there is no prompt."),
    ] = None
    prompt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT_CHARS)] | None,
        Meta(description="In place of a template: your own question, with {text} or the lines' {field}."),
    ] = None
    name: Annotated[str | None, Meta(description="The dataset's name; else made of the input's.")] = None
    count: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        Meta(description="How many lines are asked for; else one for each passage."),
    ] = None
    concurrency: Annotated[int, Meta(description="Requests under way at once.", ge=1, le=64)] = 4
    max_tokens: Annotated[int, Meta(description="Tokens of an answer at most.", ge=1, le=100_000)] = 512
    temperature: Annotated[float, Meta(description="Of the answers.", ge=0, le=2)] = 0.7
    system: Annotated[_Prompt | None, Meta(description="A system message for the model that is asked.")] = (
        None
    )
    seed: Annotated[
        Annotated[int, Meta(ge=0, le=2**32 - 1)] | None,
        Meta(description="Makes answers repeatable; each line has its own."),
    ] = None
    adapter: Annotated[str | None, Meta(description="An adapter to ask with."), source("adapter")] = None


class Dataset:
    """Kind "dataset"."""

    name = "dataset"
    summary = "Let a model write training lines about a text."
    gpu = False
    positional = ("model", "input")
    config = DatasetConfig

    def faults(self, config: DatasetConfig, here: Here) -> list[Fault]:
        faults = _name_faults(config, here)
        model = names.find_model(config.model, here.library, adapted=True)
        found = model if isinstance(model, Fault) else names.read_served(model, here)
        if isinstance(found, Fault):
            faults.append(found)
        if config.adapter is not None and found is None:
            faults.append(Fault("adapter", "the model's experts are streamed, which goes with no adapter"))
        elif config.adapter is not None:
            adapter = names.find_adapter(config.adapter, None if isinstance(found, Fault) else found, here)
            if isinstance(adapter, Fault):
                faults.append(adapter)
        if config.prompt is not None and config.template is not None:
            faults.append(Fault("template", f"{config.template} and a prompt exclude each other; give one"))
        wanted = templates.places(_template(config).prompt)
        if not wanted:
            faults.append(
                Fault("prompt", "it names no field, so each answer would be to the same; use {text}")
            )
        file = names.find_file(config.input, "input")
        if isinstance(file, Fault):
            return [*faults, file]
        try:
            records.check(file, wanted)
        except records.RecordsError as problem:
            faults.append(Fault("input", str(problem)))
        return faults

    def needs(self, _config: DatasetConfig, _here: Here) -> Needs:
        """Nothing of its own: its requests hold what they need."""
        return Needs()

    def argv(self, config: DatasetConfig, here: Here) -> list[str]:
        task = DatasetTask(
            url=here.own_url,
            model=config.model,
            input=config.input,
            target=str(_target(config, here)),
            template=_template(config),
            count=config.count,
            concurrency=config.concurrency,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            system=config.system,
            seed=config.seed,
            adapter=config.adapter,
        )
        return task_argv("mlxpool.parent.jobs.dataset", task=task)

    def env(self, _config: DatasetConfig, here: Here) -> Mapping[str, str]:
        """The key of the server's own API, where it asks for one."""
        keys = here.settings.server.api_keys
        return {KEY_VARIABLE: keys[0]} if keys else {}


def _template(config: DatasetConfig) -> Template:
    if config.prompt is not None:
        return templates.of_prompt(config.prompt)
    return TEMPLATES[config.template or _DEFAULT_TEMPLATE]


def _name(config: DatasetConfig) -> str:
    if config.name is not None:
        return config.name
    how = "lines" if config.prompt is not None else config.template or _DEFAULT_TEMPLATE
    return f"{Path(config.input).stem}-{how}"


def _target(config: DatasetConfig, here: Here) -> Path:
    return here.home.absolute() / names.DATASETS_FOLDER / f"{_name(config)}{names.DATASET_SUFFIX}"


def _name_faults(config: DatasetConfig, here: Here) -> list[Fault]:
    problem = names.name_problem(_name(config))
    if problem is not None:
        return [Fault("name", problem.replace("a model's name", "a dataset's name"))]
    target = _target(config, here)
    if target.is_symlink() or target.exists():
        return [
            Fault(
                "name",
                f"there is a dataset {_name(config)!r} already; choose another name, or remove {target}",
            )
        ]
    return []
