"""`mlxpool models`, `load`, `unload`, `pin`, `unpin`: single models.

`models` needs no server: it reads the folders, and adds what a running one says and serves besides. The
others ask the server and, as it answers before the work is done, wait for the state they asked for.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from mlxpool.parent.cli import client
from mlxpool.parent.cli.common import (
    Failure,
    json_option,
    print_json,
    print_table,
    read_settings,
    settings_options,
)
from mlxpool.parent.cli.completion import complete_model
from mlxpool.parent.hints import command
from mlxpool.shared.memory import MemoryPlan
from mlxpool.shared.units import format_size

_POLL_S = 0.1


class _ServedModel(msgspec.Struct):
    """A model of /api/library, as it is listed here."""

    name: str
    state: str
    path: str
    source: str
    model_type: str
    plan: MemoryPlan | None
    fault: str | None


class Served(msgspec.Struct):
    """The body of /api/library."""

    models: list[_ServedModel]


@click.command("models")
@settings_options
@json_option
@click.option("--models", "model_folders", multiple=True, metavar="DIR", help="As for `mlxpool up`.")
def models_command(
    config_file: Path | None, home: Path | None, as_json: bool, model_folders: tuple[str, ...]
) -> int:
    """List the models of this machine and whether they fit."""
    from mlxpool.parent.library import Library
    from mlxpool.shared import backend

    settings = read_settings(config_file, {"home": home, "models": model_folders or None})
    library = Library(settings)
    server = client.find(settings)
    states = {} if server is None else {worker.model: worker.state for worker in server.pool().workers}
    entries: list[dict[str, Any]] = []
    for model in library.models():
        described = library.describe(model, backend.detect(), library.budget().models_bytes)
        entries.append(
            {
                "name": model.name,
                "state": states.get(model.name, "absent"),
                "path": model.path,
                "source": model.source,
                "model_type": described.model_type,
                "plan": described.plan,
                "fault": described.fault,
            }
        )
    if server is not None:
        # Its --models folders are known to nobody else.
        known = {entry["name"] for entry in entries}
        served = server.get("/api/library", Served).models
        entries += [msgspec.structs.asdict(model) for model in served if model.name not in known]
        entries.sort(key=lambda entry: str(entry["name"]))
    if as_json:
        print_json({"models": entries, "aliases": settings.aliases})
        return 0
    if not entries:
        click.echo(f"no models yet: {command('pull starter', settings.home)} fetches a small one")
        return 0
    print_table(
        ["MODEL", "STATE", "NEEDS", "CONTEXT", "VERDICT"],
        [_row(entry) for entry in entries],
    )
    return 0


def _row(entry: dict[str, Any]) -> list[str]:
    plan = entry["plan"]
    if plan is None:
        return [entry["name"], entry["state"], "-", "-", f"broken: {entry['fault']}"]
    verdict = "fits" if plan.verdict == "fits" and not plan.asked_context else plan.explanation
    return [entry["name"], entry["state"], format_size(plan.planned_bytes), str(plan.context), verdict]


@click.command("load")
@click.argument("model", shell_complete=complete_model)
@click.option("--no-wait", is_flag=True, help="Return at once; the server goes on loading.")
@settings_options
@json_option
def load_command(
    model: str, no_wait: bool, config_file: Path | None, home: Path | None, as_json: bool
) -> int:
    """Load MODEL now, and wait until it is ready."""
    settings = read_settings(config_file, {"home": home})
    server = client.need(settings)
    answer = server.act(model, "load")
    name, state = answer.id, answer.state
    if not no_wait:
        deadline = time.monotonic() + settings.pool.queue_timeout + settings.pool.load_timeout
        state = _wait_until_loaded(server, name, deadline)
    _say(as_json, name, state)
    return 0


@click.command("unload")
@click.argument("model", shell_complete=complete_model)
@click.option("--force", is_flag=True, help="Cut its running requests.")
@click.option("--no-wait", is_flag=True, help="Return at once; the server lets its requests end.")
@settings_options
@json_option
def unload_command(
    model: str, force: bool, no_wait: bool, config_file: Path | None, home: Path | None, as_json: bool
) -> int:
    """Unload MODEL once its requests have ended, or at once with --force."""
    settings = read_settings(config_file, {"home": home})
    server = client.need(settings)
    answer = server.act(model, "unload", {"force": force})
    name, state = answer.id, answer.state
    if not no_wait:
        deadline = time.monotonic() + settings.pool.drain_timeout + settings.pool.stall_timeout
        state = _wait_until_gone(server, name, deadline)
    _say(as_json, name, state)
    return 0


@click.command("pin")
@click.argument("model", shell_complete=complete_model)
@settings_options
@json_option
def pin_command(model: str, config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """Keep MODEL loaded: never evicted, never idled out. Until the server ends; `pin = true` is for good."""
    client.need(read_settings(config_file, {"home": home})).act(model, "pin")
    _say(as_json, model, "pinned")
    return 0


@click.command("unpin")
@click.argument("model", shell_complete=complete_model)
@settings_options
@json_option
def unpin_command(model: str, config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """Let a pinned MODEL be evicted again."""
    client.need(read_settings(config_file, {"home": home})).act(model, "unpin")
    _say(as_json, model, "unpinned")
    return 0


def _wait_until_loaded(server: client.Client, model: str, deadline: float) -> str:
    """Poll until the model is ready. Raises Failure with the server's reason where it fails."""
    while time.monotonic() < deadline:
        worker = server.worker(model)
        if worker is not None and worker.state == "ready":
            return worker.state
        if worker is not None and worker.state == "failed":
            raise Failure(f"{model} failed to load: {worker.reason or 'the server gives no reason'}")
        time.sleep(_POLL_S)
    raise Failure(f"{model} is not loaded yet; the server goes on")


def _wait_until_gone(server: client.Client, model: str, deadline: float) -> str:
    while time.monotonic() < deadline:
        worker = server.worker(model)
        if worker is None or worker.state in ("absent", "failed"):
            return "absent"
        time.sleep(_POLL_S)
    raise Failure(f"{model} still serves requests; the server goes on draining (--force cuts them)")


def _say(as_json: bool, model: str, state: str) -> None:
    if as_json:
        print_json({"model": model, "state": state})
    else:
        click.echo(f"{model}: {state}")
