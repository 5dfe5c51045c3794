"""Fine-tuning: mlx-lm trains low-rank layers; what it is fed and what is told of it is decided here.

Validation is ours, between the steps, on the same lines each time, so that its losses can be compared: before
the first step, every so many, and after the last (mlx-lm's own is before it). The lines are rendered by the
template that serves the model. Nothing is written before the end: a run that is killed leaves no adapter.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import optimizers
from mlx.utils import tree_flatten
from mlx_lm.tuner import trainer
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.utils import build_schedule, linear_to_lora_layers
from mlx_lm.utils import save_config

from mlxpool.shared import adapters, checkpoint, training_lines
from mlxpool.shared.job_tasks import FinetuneTask, Trained
from mlxpool.shared.job_teller import Teller
from mlxpool.shared.units import format_count
from mlxpool.worker import load
from mlxpool.worker.jobs import publishing
from mlxpool.worker.jobs.examples import Tokens, tokens_of
from mlxpool.worker.jobs.model import Opened, evaluate, open_to_compute
from mlxpool.worker.jobs.process import JobError, NoLines

TASK = FinetuneTask

_LOADED = 0.05
_TRAINED = 0.97
# Buffers that MLX keeps between steps of different lengths; they would add up to a batch of every length.
_CACHE_LIMIT_BYTES = 1 << 30


def work(task: FinetuneTask, teller: Teller) -> dict[str, Any]:
    """The result: {adapter, path, train_loss, val_loss_first, val_loss_last, seconds}."""
    began_s = time.monotonic()
    root, folder = Path(task.adapters), Path(task.folder)
    with publishing.staged(root, task.name, teller) as stage:
        teller.progress(0.0, "read", "the data")
        train, valid = _sets(task, folder)
        teller.progress(0.01, "load", "the model")
        opened = open_to_compute(folder)
        evaluate(opened.model.parameters(), teller, 0.01, _LOADED, "load")
        _prepare(task, opened)
        run = Run(task, opened.model, train, valid, teller)
        run.train(stage)
        _describe(task, opened, stage)
        adapters.read(stage)
        publishing.publish(stage, root / task.name, f"finetune of {task.model}", teller)
    return {
        "adapter": task.name,
        "path": str(root / task.name),
        "train_loss": run.train_loss,
        "val_loss_first": run.val_losses[0],
        "val_loss_last": run.val_losses[-1],
        "seconds": round(time.monotonic() - began_s, 2),
    }


def _sets(task: FinetuneTask, folder: Path) -> tuple[list[Tokens], list[Tokens]]:
    """Training and validation lines as ids. Raises JobError, LinesError."""
    tokenizer = load.load_tokenizer(folder)

    def read(path: str) -> list[Tokens]:
        lines = training_lines.read(Path(path), mask_prompt=task.mask_prompt)
        made = [tokens_of(tokenizer, line, mask_prompt=task.mask_prompt) for line in lines]
        long = sum(len(ids) > task.max_seq_length for ids, _ in made)
        if long:
            print(f"{format_count(long, 'line')} of {len(made)} cut to {task.max_seq_length} tokens")
        # A line whose answer lies past the cut, or that is one token, has nothing to be learnt from.
        kept = [(ids, at) for ids, at in made if min(len(ids), task.max_seq_length) > max(at, 1)]
        if len(kept) < len(made):
            print(f"{format_count(len(made) - len(kept), 'line')} left out: nothing to learn within the cut")
        return kept

    train = read(task.data)
    if task.valid is not None:
        valid = read(task.valid)
    else:
        random.Random(task.seed).shuffle(train)
        held = training_lines.valid_count(len(train), task.valid_fraction)
        valid, train = train[:held], train[held:]
    if len(train) < task.batch_size:
        raise JobError(
            f"batch_size is {task.batch_size}, but only {format_count(len(train), 'line')} can be learnt from"
        )
    if not valid:
        raise JobError("no line is left to validate with")
    return train, _even(valid, task)


def _even(valid: list[Tokens], task: FinetuneTask) -> list[Tokens]:
    """As many whole batches as a validation takes: the rest would be left out at random."""
    most = min(len(valid), task.valid_batches * task.batch_size)
    return valid[: most - most % task.batch_size] if most >= task.batch_size else valid[:most]


def _prepare(task: FinetuneTask, opened: Opened) -> None:
    """Put low-rank layers into the model; nothing else is trained. Raises JobError."""
    model = opened.model
    mx.random.seed(task.seed)
    np.random.seed(task.seed)
    model.freeze()
    linear_to_lora_layers(model, task.layers or len(model.layers), _lora(task))
    trained = dict(tree_flatten(model.trainable_parameters()))
    if not trained:
        raise JobError(f"no layer is trained: none of the model's blocks has {', '.join(task.keys or [])}")
    for key in task.keys or ():
        if not any(f".{key}.lora" in name for name in trained):
            parts = {name.rpartition(".lora")[0].rpartition(".")[2] for name in trained}
            raise JobError(f"keys: no trained block has {key!r}; of those given there are {sorted(parts)}")
    if task.resume is not None:
        _resume(task.resume, model, trained)


def _lora(task: FinetuneTask) -> dict[str, Any]:
    lora: dict[str, Any] = {"rank": task.rank, "scale": task.scale, "dropout": task.dropout}
    return lora | ({"keys": task.keys} if task.keys is not None else {})


def _resume(resume: Trained, model: Any, trained: dict[str, mx.array]) -> None:
    """Begin with an adapter of the same shape. Raises JobError."""
    weights: Any = mx.load(str(Path(resume.folder) / adapters.WEIGHTS_FILE))
    has = {name: value.shape for name, value in weights.items()}
    if has != {name: value.shape for name, value in trained.items()}:
        raise JobError(
            f"{resume.id} was trained on other layers than these ({len(has)} matrices, not {len(trained)}); "
            "give the layers and keys that it was trained with"
        )
    model.load_weights(list(weights.items()), strict=False)


def _describe(task: FinetuneTask, opened: Opened, stage: Path) -> None:
    """The config beside the weights, as mlx-lm writes and reads it, with the model that it belongs to."""
    config = {
        "fine_tune_type": "lora",
        "model": task.folder,
        "num_layers": task.layers or len(opened.model.layers),
        "lora_parameters": _lora(task),
        "data": task.data,
        "iters": task.iters,
        "batch_size": task.batch_size,
        "learning_rate": task.learning_rate,
        "lr_schedule": _schedule(task),
        "max_seq_length": task.max_seq_length,
        "mask_prompt": task.mask_prompt,
        "grad_checkpoint": task.grad_checkpoint,
        "grad_accumulation_steps": task.grad_accumulation,
        "optimizer": "adam",
        "seed": task.seed,
        "resume_adapter_file": None if task.resume is None else task.resume.folder,
        adapters.BASE_KEY: task.model,
        "mlxpool_base_config": hashlib.sha256(
            (opened.found.folder / checkpoint.CONFIG_FILE).read_bytes()
        ).hexdigest(),
    }
    save_config(config, stage / adapters.CONFIG_FILE)


def _schedule(task: FinetuneTask) -> dict[str, Any] | None:
    """As mlx-lm's configs say it; None for a rate that stays. Counted in changes of the adapter."""
    if task.schedule == "constant" and not task.warmup:
        return None
    updates = max(1, task.iters // task.grad_accumulation)
    rest = max(1, updates - task.warmup)
    if task.schedule == "cosine":
        return {"name": "cosine_decay", "arguments": [task.learning_rate, rest], "warmup": task.warmup}
    steady = [task.learning_rate, task.learning_rate, rest]
    return {"name": "linear_schedule", "arguments": steady, "warmup": task.warmup}


class Run(TrainingCallback):  # type: ignore[misc]  # mlx-lm has no types
    """One training, from its first validation to its last.

    train_loss: the newest report's. val_losses: in order.
    """

    def __init__(
        self, task: FinetuneTask, model: Any, train: list[Tokens], valid: list[Tokens], teller: Teller
    ) -> None:
        self.train_loss = math.nan
        self.val_losses: list[float] = []
        self._task = task
        self._model = model
        self._train = train
        self._valid = valid
        self._teller = teller
        self._done = 0

    def train(self, stage: Path) -> None:
        """Leaves the adapter's weights in the stage. Raises JobError where the loss is no number."""
        task = self._task
        schedule = _schedule(task)
        rate = task.learning_rate if schedule is None else build_schedule(schedule)
        if load.backend() == "cpu":
            # It would have a compiler make a kernel for every length of line.
            mx.disable_compile()
        mx.set_cache_limit(_CACHE_LIMIT_BYTES)
        arguments = trainer.TrainingArgs(
            batch_size=task.batch_size,
            iters=task.iters,
            steps_per_report=task.steps_per_report,
            steps_per_save=task.iters + 1,
            adapter_file=str(stage / adapters.WEIGHTS_FILE),
            max_seq_length=task.max_seq_length,
            grad_checkpoint=task.grad_checkpoint,
            grad_accumulation_steps=task.grad_accumulation,
        )
        # Its own table and bars, and a warning at every batch that has a long line.
        with contextlib.redirect_stdout(NoLines()):
            trainer.train(
                model=self._model,
                optimizer=optimizers.Adam(learning_rate=rate),
                train_dataset=self._train,
                args=arguments,
                iterate_batches=self._batches,
                training_callback=self,
            )
            self._done = task.iters
            self._validate()

    def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
        loss = float(train_info["train_loss"])
        if not math.isfinite(loss):
            raise JobError(
                f"the loss is no number at step {train_info['iteration']}; lower learning_rate "
                f"({self._task.learning_rate:g}) or scale ({self._task.scale:g})"
            )
        self.train_loss = loss
        self._teller.metric(
            iteration=train_info["iteration"],
            train_loss=loss,
            learning_rate=train_info["learning_rate"],
            tokens_per_second=train_info["tokens_per_second"],
            iterations_per_second=train_info["iterations_per_second"],
            trained_tokens=train_info["trained_tokens"],
            peak_memory_bytes=train_info["peak_memory"] * 1e9,
        )

    def _batches(self, **how: Any) -> Iterator[Any]:
        """mlx-lm's batches; between them is where validations take place."""
        task = self._task
        for batch in trainer.iterate_batches(**how):
            if self._done % task.steps_per_eval == 0:
                self._validate()
            share = _LOADED + (_TRAINED - _LOADED) * self._done / task.iters
            self._teller.progress(share, "train", f"step {self._done + 1} of {task.iters}")
            yield batch
            self._done += 1

    def _validate(self) -> None:
        loss = float(
            trainer.evaluate(
                model=self._model,
                dataset=self._valid,
                batch_size=min(self._task.batch_size, len(self._valid)),
                num_batches=-1,
                max_seq_length=self._task.max_seq_length,
            )
        )
        self._model.train()
        if not math.isfinite(loss):
            raise JobError(f"the validation loss is no number after step {self._done}; lower learning_rate")
        self.val_losses.append(loss)
        self._teller.metric(iteration=self._done, val_loss=loss)
