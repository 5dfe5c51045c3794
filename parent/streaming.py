"""What a folder is whose experts are streamed: read from its headers, and planned for.

A folder is streamed where it can't be held otherwise (GLM-5.2, colibri's containers, converted records), or
where its model's settings say so. What a plan needs of an artifact is kept, without where each expert lies:
that is the worker's affair, and tens of thousands of numbers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared import checkpoint
from mlxpool.shared.backend import Backend
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.colibri import artifact, choice, tuned
from mlxpool.shared.colibri.folder import HOME_FOLDER, is_only_streamed
from mlxpool.shared.colibri.forecast import Demand, Forecast, forecast
from mlxpool.shared.colibri.launch import StreamLaunch
from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, Strided
from mlxpool.shared.colibri.plan import StreamPlan, plan
from mlxpool.shared.colibri.tuned import Tuned
from mlxpool.shared.config import ModelSettings

USAGE_FOLDER = "usage"

_NOWHERE = Strided("", 0, 0)


class Streamed(msgspec.Struct, frozen=True):
    """A folder of experts as it was under its stamp. only: it can't be held otherwise. fingerprint: as `tune`
    keeps what it found under."""

    artifact: Artifact
    only: bool
    fingerprint: str


def check_loadable(folder: Path) -> None:
    """Whether a worker could load what is in the folder, in one way or the other. Raises CheckpointError."""
    if is_only_streamed(folder):
        read(folder, only=True)
    else:
        checkpoint.read(folder)


def read(folder: Path, *, only: bool) -> Streamed:
    """What the headers say. Raises CheckpointError."""
    if not any((folder / name).is_file() for name in checkpoint.TOKENIZER_FILES):
        raise CheckpointError(
            f"{checkpoint.called(folder)}: no tokenizer: none of {', '.join(checkpoint.TOKENIZER_FILES)}"
        )
    found = artifact.read(folder)
    return Streamed(_without_places(found), only, tuned.fingerprint(found))


def tuned_stamp(home: Path) -> tuple[int, int] | None:
    """Changes when what was tuned does."""
    try:
        status = os.stat(tuned.path(home))
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def plan_of(
    streamed: Streamed,
    own: ModelSettings,
    home: Path,
    *,
    backend: Backend,
    limit_bytes: int | None,
    limit_is_explicit: bool,
    context: int | None,
    found: Tuned | None = None,
) -> tuple[StreamPlan, StreamLaunch]:
    """The plan under these settings, and what a worker is told. context: tokens, None for the settings'.
    found: as if `tune` had kept this, None for what it has kept.

    Raises CheckpointError.
    """
    choice.check(own, streamed.artifact, only_streamed=streamed.only)
    if found is None:
        found = tuned.read(home).of(streamed.fingerprint, backend)
    made = plan(
        artifact.on_backend(streamed.artifact, backend),
        choice.wishes(own, streamed.artifact, found, context),
        backend=backend,
        limit_bytes=limit_bytes,
        limit_is_explicit=limit_is_explicit,
    )
    return made, choice.launch(own, found, made, str(home / HOME_FOLDER / USAGE_FOLDER))


def speed(plan: StreamPlan, disk_bytes_per_s: float) -> Forecast:
    """What the reads alone allow at this rate."""
    demand = Demand(plan.layers, plan.top_k, plan.experts, plan.record_bytes)
    return forecast(demand, plan.slots, plan.chunk, disk_bytes_per_s)


def view(plan: StreamPlan) -> dict[str, Any]:
    """A plan as `/api/fit` and the command line show it."""
    told: dict[str, Any] = msgspec.to_builtins(plan)
    return {**told, "slabs_bytes": plan.slabs_bytes, "generation_limit": plan.generation_limit}


def _without_places(found: Artifact) -> Artifact:
    def bare(layout: ExpertLayout) -> ExpertLayout:
        pieces = tuple(msgspec.structs.replace(piece, places=_NOWHERE) for piece in layout.pieces)
        return msgspec.structs.replace(layout, pieces=pieces)

    return msgspec.structs.replace(
        found,
        layers=tuple(bare(layout) for layout in found.layers),
        mtp=None if found.mtp is None else bare(found.mtp),
    )
