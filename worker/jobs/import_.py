"""Importing a GGUF: its numbers rearranged or dequantised into a model folder, row by row.

numpy does it, so the GPU is not asked for and models go on serving meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxpool.shared import checkpoint
from mlxpool.shared.job_tasks import ImportTask
from mlxpool.shared.job_teller import Teller
from mlxpool.worker.gguf.convert import convert
from mlxpool.worker.jobs import publishing
from mlxpool.worker.jobs.process import JobError

TASK = ImportTask
# The part of the work that is not hashing and making durable.
_WRITTEN = 0.95


def work(task: ImportTask, teller: Teller) -> dict[str, Any]:
    """The model's name, folder and size. Raises JobError, GgufError, OSError."""
    source, models = Path(task.file), Path(task.models)
    with publishing.staged(models, task.name, teller) as stage:

        def progress(done: int, total: int) -> None:
            teller.bytes(_WRITTEN * done / total, "write", done, total)

        teller.progress(0.0, "read", source.name)
        convert(source, stage, task.dtype, progress)
        try:
            written = checkpoint.read(stage)
        except checkpoint.CheckpointError as problem:
            raise JobError(f"what was written is not whole, so it was not published: {problem}") from None
        target = models / task.name
        publishing.publish(stage, target, f"import of {source.name}", teller)
    return {"model": task.name, "path": str(target), "size_bytes": written.weights_bytes, "dtype": task.dtype}
