"""How a job's output gets its name: put together in a stage of its own, then renamed, whole and durable.

A disk that is full shows as an error of the write, or as a short file that reading back finds; either way the
stage goes and the name stays free. Nothing here is MLX's, so jobs without it publish in the same way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from mlxpool.shared import staging
from mlxpool.shared.job_teller import Teller
from mlxpool.shared.units import format_size
from mlxpool.worker.jobs.process import JobError


@contextlib.contextmanager
def staged(root: Path, name: str, teller: Teller) -> Iterator[Path]:
    """An empty folder to put the output `root/name` together in, this process's alone; it is gone afterwards
    unless it was published. Raises JobError where the name is taken, or the disk refuses."""
    root.mkdir(parents=True, exist_ok=True)
    with staging.locked(
        root, name, lambda: teller.progress(0.0, "wait", f"for another job that makes {name}")
    ):
        if os.path.lexists(root / name):
            raise JobError(f"there is a {root / name} by now; choose another name")
        stage = staging.stage_folder(root, name)
        shutil.rmtree(stage, ignore_errors=True)
        try:
            stage.mkdir()
            yield stage
        except (OSError, RuntimeError) as problem:
            raise JobError(_write_problem(root, name, problem)) from problem
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _write_problem(root: Path, name: str, problem: Exception) -> str:
    text = " ".join((getattr(problem, "strerror", None) or str(problem)).split())
    free = format_size(shutil.disk_usage(root).free)
    return f"{name} can't be made under {root} ({free} are free there): {text}"


def publish(stage: Path, target: Path, source: str, teller: Teller) -> None:
    """Hash, make durable, rename. source: what it was made of, for the manifest."""
    paths = sorted(path for path in stage.iterdir() if path.is_file())
    teller.progress(0.97, "publish")
    files = {path.name: staging.ManifestFile(path.stat().st_size, staging.sha256_of(path)) for path in paths}
    try:
        staging.publish(stage, target, staging.Manifest(target.name, source, files))
    except OSError as problem:
        if os.path.lexists(target):
            raise JobError(f"there is a {target} by now; choose another name") from problem
        raise
