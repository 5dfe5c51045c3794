"""Fine-tuning: an adapter (LoRA) that is trained on lines of text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mlxpool.shared import adapters, training_lines
from mlxpool.shared.checkpoint import Checkpoint, CheckpointError
from mlxpool.shared.job_tasks import FinetuneTask, Trained
from mlxpool.shared.model_facts import model_facts
from mlxpool.shared.text import cut
from mlxpool.shared.training_lines import LinesError, Survey
from mlxpool.shared.units import format_count

from . import estimates, names
from .computing import Computing
from .kind import Fault, Here, Needs, source

# What a template and its marks add to a line's texts.
_TEMPLATE_TOKENS = 64
_NAMED_KEYS = 8


class FinetuneConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """What is trained on what, and how."""

    model: Annotated[str, Meta(description="The model to train an adapter for."), source("model")]
    data: Annotated[
        str,
        Meta(description="JSONL to train on: a dataset's name, or a file's absolute path."),
        source("dataset"),
    ]
    valid: Annotated[
        str | None,
        Meta(description="JSONL to validate with; else a part of the data is held back."),
        source("dataset"),
    ] = None
    name: Annotated[
        str | None, Meta(description="The adapter's name; else made of the model's and the data's.")
    ] = None
    iters: Annotated[int, Meta(description="Steps of training.", ge=1, le=1_000_000)] = 600
    batch_size: Annotated[int, Meta(description="Lines in a step.", ge=1, le=1024)] = 4
    learning_rate: Annotated[float, Meta(description="Of Adam.", gt=0, le=1)] = 1e-4
    valid_fraction: Annotated[
        float,
        Meta(description="Part of the data that is held back where `valid` is not given.", gt=0, le=0.5),
    ] = 0.1
    valid_batches: Annotated[
        int, Meta(description="Batches that a validation takes at most.", ge=1, le=10_000)
    ] = 25
    schedule: Annotated[
        Literal["constant", "cosine"], Meta(description="How the learning rate goes on after the warm-up.")
    ] = "constant"
    warmup: Annotated[
        int, Meta(description="Steps in which the learning rate rises from 0.", ge=0, le=1_000_000)
    ] = 0
    layers: Annotated[
        int, Meta(description="How many blocks are trained, counted from the last; 0 for all.", ge=0, le=4096)
    ] = 0
    rank: Annotated[int, Meta(description="Rank of the adapter's matrices.", ge=1, le=1024)] = 8
    scale: Annotated[
        float, Meta(description="What the adapter's output is multiplied with.", gt=0, le=1000)
    ] = 20.0
    dropout: Annotated[
        float, Meta(description="Part of the adapter's input that is dropped.", ge=0, lt=1)
    ] = 0.0
    keys: Annotated[
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(min_length=1, max_length=64)]
        | None,
        Meta(description="Layers of a block to train, as self_attn.q_proj; else all linear ones."),
    ] = None
    max_seq_length: Annotated[
        int, Meta(description="Tokens of a line at most; longer ones are cut.", ge=8, le=1_000_000)
    ] = 2048
    mask_prompt: Annotated[bool, Meta(description="Learn the answers alone, not the prompts.")] = False
    grad_checkpoint: Annotated[bool, Meta(description="Less memory for more time.")] = False
    grad_accumulation: Annotated[
        int, Meta(description="Steps whose gradients make one change of the adapter.", ge=1, le=1024)
    ] = 1
    steps_per_report: Annotated[
        int, Meta(description="Steps between two reports of the loss.", ge=1, le=1_000_000)
    ] = 10
    steps_per_eval: Annotated[
        int,
        Meta(
            description="Steps between two validations; the start and the end have one.", ge=1, le=1_000_000
        ),
    ] = 200
    seed: Annotated[int, Meta(description="Of everything drawn at random.", ge=0, le=2**32 - 1)] = 0
    resume_adapter: Annotated[
        str | None, Meta(description="An adapter to begin with, instead of a random one."), source("adapter")
    ] = None


class Finetune(Computing):
    """Kind "finetune"."""

    name = "finetune"
    summary = "Train an adapter (LoRA) for a model on lines of text."
    positional = ("model", "data")
    config = FinetuneConfig

    def faults(self, config: FinetuneConfig, here: Here) -> list[Fault]:
        faults = _step_faults(config)
        model = names.find_model(config.model, here.library)
        found = model if isinstance(model, Fault) else names.read_model(model)
        if isinstance(found, Fault):
            faults.append(found)
        else:
            faults += _model_faults(config, found)
        data = names.find_lines(config.data, here, "data")
        if not isinstance(model, Fault) and not isinstance(data, Fault):
            faults += names.new_adapter_faults(_name(config, model.name, data), here)
        if config.resume_adapter is not None:
            checked = None if isinstance(found, Fault) else found
            faults += _resume_faults(config, config.resume_adapter, checked, here)
        faults += _line_faults(config, data, here, None if isinstance(found, Fault) else found)
        if not faults:
            assert not isinstance(found, Fault)
            weights = estimates.adapter_weights(
                found, model_facts(found), _layers(config, found), config.rank
            )
            faults += estimates.room_faults(names.adapters_folder(here), 4 * weights)
        return faults

    def needs(self, config: FinetuneConfig, here: Here) -> Needs:
        """Memory: the weights, the adapter four times (gradient and Adam's averages), and for a step's tokens
        (the batch's lines, each as long as the longest) what the trained blocks keep, and the logits."""
        found = names.find_checkpoint(config.model, here.library)
        data = names.find_lines(config.data, here, "data")
        if isinstance(found, Fault) or isinstance(data, Fault):
            return Needs(gpu=True)
        try:
            lines, facts = training_lines.survey(data), model_facts(found)
        except (LinesError, CheckpointError):
            return Needs(gpu=True)  # changed since it was checked: the process says so
        return Needs(
            gpu=True,
            memory_bytes=estimates.training_bytes(
                found,
                facts,
                here.backend,
                rows=config.batch_size,
                tokens=min(lines.tokens + _TEMPLATE_TOKENS, config.max_seq_length),
                layers=_layers(config, found),
                rank=config.rank,
                checkpointed=config.grad_checkpoint,
            ),
        )

    def argv(self, config: FinetuneConfig, here: Here) -> list[str]:
        model = here.library.resolve(config.model)
        data = _found(names.find_lines(config.data, here, "data"))
        valid = None if config.valid is None else _found(names.find_lines(config.valid, here, "valid"))
        plain = msgspec.to_builtins(config) | msgspec.structs.asdict(config)
        own = {field: plain[field] for field in FinetuneTask.__struct_fields__ if field in plain}
        resume = config.resume_adapter
        folder = names.adapters_folder(here).absolute()
        own |= {
            "model": model.name,
            "folder": str(model.path.absolute()),
            "adapters": str(folder),
            "name": _name(config, model.name, data),
            "data": str(data),
            "valid": None if valid is None else str(valid),
            "resume": None if resume is None else Trained(resume, str(folder / resume)),
        }
        return self.command(FinetuneTask(**own))


def _found(path: Path | Fault) -> Path:
    """What has been checked; gone since, it is named as it was asked for, and its process says so."""
    return Path(path.message) if isinstance(path, Fault) else path


def _name(config: FinetuneConfig, model: str, data: Path) -> str:
    return config.name if config.name is not None else f"{names.last_part(model)}-{data.stem}"


def _blocks(found: Checkpoint) -> int:
    try:
        return len(model_facts(found).layers)
    except CheckpointError:
        return 0


def _layers(config: FinetuneConfig, found: Checkpoint) -> int:
    return (config.layers and min(config.layers, _blocks(found))) or _blocks(found)


def _step_faults(config: FinetuneConfig) -> list[Fault]:
    faults = []
    updates = config.iters // config.grad_accumulation
    if updates == 0:
        faults.append(
            Fault(
                "grad_accumulation",
                f"{config.grad_accumulation} is more than the {format_count(config.iters, 'step')} "
                "of `iters`, so nothing would change",
            )
        )
    elif config.warmup >= updates:
        faults.append(
            Fault(
                "warmup",
                f"{config.warmup} leaves none of the {format_count(updates, 'change')} of the adapter",
            )
        )
    return faults


def _model_faults(config: FinetuneConfig, found: Checkpoint) -> list[Fault]:
    """What of the configuration the model's shapes and files do not allow."""
    faults = []
    blocks = _blocks(found)
    if config.layers > blocks:
        faults.append(Fault("layers", f"{config.layers}, but the model has {blocks}; 0 trains all of them"))
    known = {part for name in found.tensors for part in name.split(".")[:-1] if not part.isdigit()}
    for key in config.keys or ():
        last = key.rpartition(".")[2]
        if last not in known:
            some = ", ".join(sorted(known)[:_NAMED_KEYS])
            faults.append(
                Fault("keys", f"no layer is called {cut(key)!r}; parts of layers' names are {some}, …")
            )
    return faults


def _resume_faults(config: FinetuneConfig, resume: str, found: Checkpoint | None, here: Here) -> list[Fault]:
    """An adapter goes on in its own shape alone."""
    trained = names.find_adapter(resume, found, here, "resume_adapter")
    if isinstance(trained, Fault):
        return [trained]
    read = adapters.read(Path(trained.folder))
    faults = []
    if read.rank != config.rank:
        faults.append(Fault("rank", f"{config.rank}, but {resume} has rank {read.rank}; use that"))
    if read.scale != config.scale:
        faults.append(Fault("scale", f"{config.scale:g}, but {resume} has scale {read.scale:g}; use that"))
    return faults


def _line_faults(
    config: FinetuneConfig, data: Path | Fault, here: Here, found: Checkpoint | None
) -> list[Fault]:
    """What is wrong with the lines, or with how many there are."""
    faults: list[Fault] = []
    train = _read(config, data, "data", faults)
    valid = None
    if config.valid is not None:
        valid = _read(config, names.find_lines(config.valid, here, "valid"), "valid", faults)
    if found is not None and not _has_template(found):
        for field, lines in (("data", train), ("valid", valid)):
            if lines is not None and lines.conversations:
                what = "has conversations, and the model no chat template"
                faults.append(Fault(field, f'{what}; give it {{"text"}} lines'))
    if train is not None:
        held = (
            0 if config.valid is not None else training_lines.valid_count(train.lines, config.valid_fraction)
        )
        if train.lines - held < config.batch_size:
            after = f" ({held} of {train.lines} are held back for validation)" if held else ""
            left = format_count(train.lines - held, "line")
            faults.append(
                Fault("batch_size", f"{config.batch_size}, but there is too little to fill it: {left}{after}")
            )
    return faults


def _read(config: FinetuneConfig, path: Path | Fault, field: str, faults: list[Fault]) -> Survey | None:
    if isinstance(path, Fault):
        faults.append(path)
        return None
    try:
        return training_lines.survey(path, mask_prompt=config.mask_prompt)
    except LinesError as problem:
        faults.append(Fault(field, str(problem)))
        return None


def _has_template(found: Checkpoint) -> bool:
    # It brings the tokenizers, which a server loads at need alone.
    from mlxpool.shared.chat import ChatTokenizerError, read_json, template_of

    try:
        return template_of(found.folder, read_json(found.folder / "tokenizer_config.json")) is not None
    except ChatTokenizerError:
        return True  # what is wrong with it is told when it is opened
