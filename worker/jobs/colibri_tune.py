"""Trying settings of a model whose experts are streamed. What was found is kept by who asked for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared.colibri.tasks import ColibriTuneTask
from mlxpool.shared.job_teller import Teller
from mlxpool.worker import load
from mlxpool.worker.colibri.tune import tune

TASK = ColibriTuneTask


def work(task: ColibriTuneTask, teller: Teller) -> dict[str, Any]:
    """The result is measured.TuneResult."""
    tokenizer = load.load_tokenizer(Path(task.folder))
    told: dict[str, Any] = msgspec.to_builtins(tune(task, tokenizer.encode, teller.progress))
    return told
