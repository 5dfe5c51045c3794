"""What a killed server's jobs have left on the disk, when the next one starts: stages, and logs of no row.

A stage that its maker can go on with stays: those of pulls and of conversions to records. Everything here is
a help, never a condition of serving: what can't be deleted is left.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection
from pathlib import Path

from mlxpool.parent.hub.plan import PLAN_FILE
from mlxpool.parent.library import MODELS_FOLDER
from mlxpool.parent.starter import MODEL_NAME as STARTER
from mlxpool.shared import staging
from mlxpool.shared.adapters import ADAPTERS_FOLDER
from mlxpool.shared.colibri.folder import RECORDS_PROGRESS

from .kinds.names import DATASETS_FOLDER

_STAGE = ".staging-"


def clean_stages(home: Path) -> None:
    """Delete what jobs that were killed can't go on with."""
    models = home / MODELS_FOLDER
    for stage in [*models.glob(f"{_STAGE}*"), *(home / ADAPTERS_FOLDER).glob(f"{_STAGE}*")]:
        key = stage.name.removeprefix(_STAGE)
        goes_on = stage.parent == models and (
            key == STARTER or (stage / PLAN_FILE).exists() or (stage / RECORDS_PROGRESS).exists()
        )
        # A command that works without a server holds the lock.
        with contextlib.suppress(OSError, staging.PullError):
            if not goes_on:
                with staging.locked(stage.parent, key, None):
                    shutil.rmtree(stage)
    for part in (home / DATASETS_FOLDER).glob(".*.part"):
        with contextlib.suppress(OSError):
            part.unlink()


def sweep_logs(folder: Path, known: Collection[str]) -> None:
    """Delete the logs of rows that are no more."""
    for log in folder.glob("job_*.ndjson"):
        if log.stem not in known:
            with contextlib.suppress(OSError):
                log.unlink()
