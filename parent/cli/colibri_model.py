"""What commands about a streamed model share: finding it, its plan, and the memory that it is to have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import click
import msgspec

from mlxpool.parent import hints
from mlxpool.parent.cli.common import Failure
from mlxpool.parent.run_folder import read_address
from mlxpool.shared.config import ModelSettings, Settings

if TYPE_CHECKING:
    from mlxpool.parent.streaming import Streamed
    from mlxpool.shared.backend import Backend
    from mlxpool.shared.colibri.launch import StreamLaunch
    from mlxpool.shared.colibri.plan import StreamPlan
    from mlxpool.shared.colibri.tuned import Tuned


_Result = TypeVar("_Result")


class Planned(NamedTuple):
    """A plan and what a worker would be told."""

    plan: StreamPlan
    launch: StreamLaunch


class Model(NamedTuple):
    """A model that can be streamed, and its settings in effect."""

    folder: Path
    own: ModelSettings
    settings: Settings
    streamed: Streamed
    backend: Backend

    def planned(self, found: Tuned | None = None) -> Planned:
        """By the settings and what `tune` has kept, or as if that were `found`. Raises Failure where it can't
        be had."""
        from mlxpool.parent import streaming
        from mlxpool.parent.library import Library
        from mlxpool.shared.checkpoint import CheckpointError

        try:
            plan, launch = streaming.plan_of(
                self.streamed,
                self.own,
                self.settings.home,
                backend=self.backend,
                limit_bytes=Library(self.settings).budget().models_bytes,
                limit_is_explicit=self.settings.budget_is_explicit,
                context=None,
                found=found,
            )
        except CheckpointError as problem:
            raise Failure(str(problem)) from None
        if plan.verdict == "does_not_fit":
            raise Failure(plan.explanation)
        return Planned(plan, launch)


def run(
    found: Model, name: str, task: msgspec.Struct, what: str, kind: type[_Result], *, quiet: bool
) -> _Result:
    """What the task of that name gives, in a process of this command. what: the work, in messages. quiet:
    without progress. Raises Failure."""
    from mlxpool.parent.cli import follow
    from mlxpool.parent.jobs.kinds.computing import task_argv
    from mlxpool.shared.backend import worker_environment

    argv = task_argv("mlxpool.worker.jobs", name, task=task)
    with follow.progress(quiet=quiet) as report:
        told = follow.own_process(argv, report, what, worker_environment(found.backend))
    return msgspec.convert(told, kind)


def find_folder(name: str, settings: Settings) -> tuple[Path, ModelSettings]:
    """A folder by its path, else a model of the library by its name. Raises UsageError."""
    if os.path.isdir(name):
        folder = Path(name).absolute()
        return folder, settings.model(folder.resolve().name)
    from mlxpool.parent.jobs.kinds import names
    from mlxpool.parent.jobs.kinds.kind import Fault
    from mlxpool.parent.library import Library

    model = names.find_model(name, Library(settings))
    if isinstance(model, Fault):
        raise click.UsageError(f"{name!r} is no folder, and {model.message}")
    return model.path.absolute(), model.settings


def to_be_loaded(name: str, settings: Settings) -> Model:
    """A model for a process of this command to load. Raises UsageError, Failure: also where a server has
    models in the memory that this one is planned into."""
    from mlxpool.parent import streaming
    from mlxpool.shared.backend import detect
    from mlxpool.shared.checkpoint import CheckpointError
    from mlxpool.shared.colibri.folder import is_only_streamed

    folder, own = find_folder(name, settings)
    _check_memory_is_free(settings)
    try:
        streamed = streaming.read(folder, only=is_only_streamed(folder))
    except CheckpointError as problem:
        raise Failure(str(problem)) from None
    return Model(folder, msgspec.structs.replace(own, experts="stream"), settings, streamed, detect())


def _check_memory_is_free(settings: Settings) -> None:
    from mlxpool.parent.cli import client

    address = read_address(settings.home)
    if address is None or not client.is_running(address):
        return
    workers = [worker for worker in client.need(settings).pool().workers if worker.pid is not None]
    if workers:
        names = ", ".join(worker.model for worker in workers)
        unload = hints.command(f"unload {workers[0].model}", settings.home)
        down = hints.command("down", settings.home)
        raise Failure(
            f"the server holds {names} in the memory that this needs; {unload} for each, or {down}, first"
        )
