"""What kinds that compute with a model share: they run alone on the GPU, and their process is one of ours."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from .kind import Here


def task_argv(module: str, *words: str, task: msgspec.Struct) -> list[str]:
    """A module of ours as the process for a task, which travels as one argument."""
    return [sys.executable, "-m", module, *words, "--task", msgspec.json.encode(task).decode()]


class Computing:
    """To be a kind's base: its jobs are `python -m mlxpool.worker.jobs NAME`."""

    name = ""
    gpu = True

    def env(self, _config: object, _here: Here) -> Mapping[str, str]:
        """Nothing: every process of a worker's module gets what MLX needs."""
        return {}

    def command(self, task: msgspec.Struct) -> list[str]:
        """The process for a task of shared/job_tasks.py."""
        return task_argv("mlxpool.worker.jobs", self.name, task=task)
