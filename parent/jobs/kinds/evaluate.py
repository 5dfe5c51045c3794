"""Evaluating: how well a model predicts a text."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from mlxpool.shared import training_lines
from mlxpool.shared.checkpoint import Checkpoint, CheckpointError
from mlxpool.shared.job_tasks import EvaluateTask, Trained
from mlxpool.shared.model_facts import ModelFacts, model_facts
from mlxpool.shared.training_lines import LinesError
from mlxpool.shared.units import format_size

from . import estimates, names
from .computing import Computing
from .kind import Fault, Here, Needs, source

DEFAULT_CONTEXT_TOKENS = 2048


class EvaluateConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Which model predicts what."""

    model: Annotated[str, Meta(description="The model."), source("model")]
    file: Annotated[
        str,
        Meta(
            description="A text, or JSONL as for finetune (then answers are predicted): a dataset's name, "
            "or a file's absolute path."
        ),
        source("dataset"),
    ]
    adapter: Annotated[str | None, Meta(description="An adapter to use."), source("adapter")] = None
    context: Annotated[
        Annotated[int, Meta(ge=2, le=1_000_000)] | None,
        Meta(description=f"Tokens that a prediction looks back at, at most; else {DEFAULT_CONTEXT_TOKENS}."),
    ] = None
    stride: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Meta(description="Tokens predicted before the window moves on; else the whole window."),
    ] = None
    limit_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**53)] | None, Meta(description="Predictions after which it ends.")
    ] = None


class Evaluate(Computing):
    """Kind "evaluate"."""

    name = "evaluate"
    summary = "Measure how well a model predicts a text: its loss and perplexity."
    positional = ("model", "file")
    config = EvaluateConfig

    def faults(self, config: EvaluateConfig, here: Here) -> list[Fault]:
        faults: list[Fault] = []
        found = names.find_checkpoint(config.model, here.library)
        if isinstance(found, Fault):
            faults.append(found)
        else:
            faults += _window_faults(config, found)
        path = names.find_lines(config.file, here, "file")
        if isinstance(path, Fault):
            faults.append(path)
        else:
            try:
                if path.suffix == names.DATASET_SUFFIX:
                    training_lines.survey(path)
                elif path.stat().st_size > training_lines.MAX_FILE_BYTES:
                    most = format_size(training_lines.MAX_FILE_BYTES)
                    faults.append(Fault("file", f"{path.name} is larger than {most}; give a part of it"))
            except (LinesError, OSError) as problem:
                faults.append(Fault("file", str(problem)))
        if config.adapter is not None:
            trained = names.find_adapter(config.adapter, None if isinstance(found, Fault) else found, here)
            if isinstance(trained, Fault):
                faults.append(trained)
        return faults

    def needs(self, config: EvaluateConfig, here: Here) -> Needs:
        """Memory: the weights, one window's KV while it grows, and a chunk's activations and logits."""
        found = names.find_checkpoint(config.model, here.library)
        if isinstance(found, Fault):
            return Needs(gpu=True)
        try:
            facts = model_facts(found)
        except CheckpointError:
            return Needs(gpu=True)
        context = _context(config, facts)
        return Needs(gpu=True, memory_bytes=estimates.scoring_bytes(facts, here.backend, context))

    def argv(self, config: EvaluateConfig, here: Here) -> list[str]:
        model = here.library.resolve(config.model)
        path = names.find_lines(config.file, here, "file")
        file = config.file if isinstance(path, Fault) else str(path)
        adapter = config.adapter
        found = names.read_model(model)
        facts = None if isinstance(found, Fault) else model_facts(found)
        context = _context(config, facts)
        folder = names.adapters_folder(here).absolute()
        task = EvaluateTask(
            model=model.name,
            folder=str(model.path.absolute()),
            file=file,
            is_lines=file.endswith(names.DATASET_SUFFIX),
            context=context,
            stride=config.stride or context,
            limit_tokens=config.limit_tokens,
            adapter=None if adapter is None else Trained(adapter, str(folder / adapter)),
        )
        return self.command(task)


def _context(config: EvaluateConfig, facts: ModelFacts | None) -> int:
    own = None if facts is None else facts.max_context
    return config.context or min(DEFAULT_CONTEXT_TOKENS, own or DEFAULT_CONTEXT_TOKENS)


def _window_faults(config: EvaluateConfig, found: Checkpoint) -> list[Fault]:
    try:
        facts = model_facts(found)
    except CheckpointError as problem:
        return [Fault("model", str(problem))]
    faults = []
    own, context = facts.max_context, _context(config, facts)
    if own is not None and context > own:
        faults.append(Fault("context", f"{context}, but the model's own is {own}; at most that"))
    if config.stride is not None and config.stride > context:
        faults.append(Fault("stride", f"{config.stride} is more than the context of {context}; at most that"))
    return faults
