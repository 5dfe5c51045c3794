"""`mlxpool rm`: a model off the disk, or what a pull that never ended has left of one.

Where a server of this home runs it does the removal, because it knows what is loaded.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from urllib.parse import quote

import click
import msgspec

from mlxpool.parent import removal
from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import Failure, json_option, print_json, read_settings, settings_options
from mlxpool.parent.hints import command
from mlxpool.parent.library import Library, LibraryModel
from mlxpool.shared.config import Settings
from mlxpool.shared.errors import ApiError
from mlxpool.shared.kv import folder
from mlxpool.shared.staging import PullError
from mlxpool.shared.units import format_size

_POLL_S = 0.1


class _Removed(msgspec.Struct):
    """What was removed."""

    id: str
    path: str
    freed_bytes: int


@click.command("rm")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option(
    "--unload", is_flag=True, help="Unload it first where it is loaded, once its requests have ended."
)
@settings_options
@json_option
def rm_command(
    name: str, yes: bool, unload: bool, config_file: Path | None, home: Path | None, as_json: bool
) -> int:
    """Remove the model NAME from home/models; also what an unfinished pull of it has left."""
    settings = read_settings(config_file, {"home": home})
    model = Library(settings).find(name)
    size_bytes = removal.size_bytes(_place(settings, name, model))
    server = client.find(settings)
    if server is not None and model is not None and not unload:
        _refuse_loaded(server, name, settings)
    if not yes and not _is_wanted(name if model else f"the unfinished download of {name}", size_bytes):
        click.echo(f"{name} stays")
        return 1
    if server is not None and model is not None:
        if unload:
            _unload(server, name, settings)
        removed = server.delete(f"/api/library/{quote(name, safe='')}", _Removed)
    else:
        removed = _remove(settings, name, model)
    if as_json:
        print_json(removed)
    else:
        click.echo(f"{name} is removed: {format_size(removed.freed_bytes)} freed")
        _tell_about_prompts(settings, name)
    return 0


def _tell_about_prompts(settings: Settings, name: str) -> None:
    """What is kept of its prompts stays: the model may come back."""
    try:
        kept = sum(use.bytes for use in folder.scan(settings.kv_folder) if use.model == name)
    except OSError:
        return
    if kept:
        prune = command("cache prune", settings.home)
        click.echo(f"{format_size(kept)} of its prompts are still on disk: {prune} deletes them")


def _place(settings: Settings, name: str, model: LibraryModel | None) -> Path:
    """The folder to be removed. Raises Failure where there is none, or it is not ours."""
    if model is not None:
        refused = removal.refusal(model)
        if refused is not None:
            raise Failure(refused)
        return model.path
    stage = removal.find_stage(settings.home, name)
    if stage is not None:
        return stage
    try:
        other = Library(settings).resolve(name).name
    except ApiError as problem:
        raise Failure(problem.message.replace(" on this server", " here")) from None
    raise Failure(f"{name!r} is an alias; use the model's own name, {other!r}")


def _is_wanted(what: str, size_bytes: int) -> bool:
    if not sys.stdin.isatty():
        raise Failure("nobody is here to be asked; --yes removes without a question")
    return click.confirm(f"Remove {what} ({format_size(size_bytes)})?", err=True)


def _refuse_loaded(server: client.Client, name: str, settings: Settings) -> None:
    worker = server.worker(name)
    if worker is not None and worker.state not in ("absent", "failed"):
        unload = command(f"rm {name} --unload", settings.home)
        raise Failure(f"{name} is {worker.state}; {unload} unloads it first")


def _unload(server: client.Client, name: str, settings: Settings) -> None:
    """Unload and wait. Raises Failure where its requests do not end in time."""
    server.act(name, "unload")
    deadline = time.monotonic() + settings.pool.drain_timeout + settings.pool.stall_timeout
    while (worker := server.worker(name)) is not None and worker.state not in ("absent", "failed"):
        if time.monotonic() > deadline:
            force = command(f"unload {name} --force", settings.home)
            raise Failure(f"{name} still serves requests; {force} cuts them")
        time.sleep(_POLL_S)


def _remove(settings: Settings, name: str, model: LibraryModel | None) -> _Removed:
    try:
        if model is None:
            path, freed_bytes = removal.delete_stage(settings.home, name)
        else:
            path, freed_bytes = model.path, removal.size_bytes(model.path)
            removal.delete(removal.unlist(model, settings.home))
    except OSError as problem:
        raise Failure(f"{name} could not be removed: {problem}") from None
    except PullError as problem:
        raise Failure(str(problem)) from None
    return _Removed(name, str(path), freed_bytes)
