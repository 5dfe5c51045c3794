"""Measuring a model whose experts are streamed, as it would be served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared.colibri.tasks import ColibriBenchTask
from mlxpool.shared.job_teller import Teller
from mlxpool.worker import load
from mlxpool.worker.colibri.bench import bench

TASK = ColibriBenchTask


def work(task: ColibriBenchTask, teller: Teller) -> dict[str, Any]:
    """The result is measured.Bench."""
    folder = Path(task.folder)
    tokenizer = load.load_tokenizer(folder)
    done = bench(
        folder,
        task.launch,
        task.limit_bytes,
        task.tokens,
        task.prompt_tokens,
        tokenizer.encode,
        teller.progress,
    )
    told: dict[str, Any] = msgspec.to_builtins(done)
    return told
