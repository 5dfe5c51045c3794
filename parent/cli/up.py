"""`mlxpool up`: settings from every layer, then the server, in this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from mlxpool.parent.cli.common import read_settings, settings_options
from mlxpool.shared.config import Settings, load

F = TypeVar("F", bound=Callable[..., Any])


def serve_options(command: F) -> F:
    """What a server may be told on its command line, besides which settings it is about."""
    options = (
        click.option("--host", help="Address to listen on; anything but loopback needs api_keys."),
        click.option("--port", help="Port to listen on; 0 picks a free one."),
        click.option(
            "--models",
            "model_folders",
            multiple=True,
            metavar="DIR",
            help="A folder of model folders, besides home/models. May be given more than once.",
        ),
        click.option("--memory-budget", help="Memory for models: 48GB, or a share like 75%."),
        click.option("--model", help="A model to load at start."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def serve_flags(
    home: Path | None,
    host: str | None,
    port: str | None,
    model_folders: tuple[str, ...],
    memory_budget: str | None,
    model: str | None,
    **_: object,
) -> dict[str, object]:
    """Those options as flags of the settings."""
    return {
        "home": home,
        "server.host": host,
        "server.port": port,
        "pool.memory_budget": memory_budget,
        "models": model_folders or None,
        "model": model,
    }


@click.command("up")
@settings_options
@serve_options
@click.option(
    "--log-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write everything to this file, rotated, and nothing to the terminal.",
)
def up_command(config_file: Path | None, log_file: Path | None, **options: Any) -> int:
    """Serve the models of this machine, in the foreground.

    Prints its address. Ctrl-C or SIGTERM lets running requests end; a second one cuts them.
    """
    if log_file is not None:
        # First of all: what is wrong with the settings is read there too.
        _write_to(log_file)
    settings = read_settings(config_file, serve_flags(**options))
    _look_at_models(settings)
    from mlxpool.parent import app

    return app.run(settings, read_again=partial(load, config_file, None, serve_flags(**options)))


def _write_to(log_file: Path) -> None:
    from mlxpool.parent.log_file import LogFile

    try:
        LogFile(log_file.expanduser().absolute()).attach()
    except OSError as problem:
        raise click.UsageError(
            f"--log-file = {str(log_file)!r}: can't be written: {problem.strerror}; name another file"
        ) from None


def _look_at_models(settings: Settings) -> None:
    """Say what a newcomer needs to know before the first request fails."""
    from mlxpool.parent.hints import command
    from mlxpool.parent.library import Library
    from mlxpool.shared.errors import ApiError

    library = Library(settings)
    for name, folders in library.shadowed().items():
        for folder in folders:
            click.echo(f"mlxpool: {folder} is not served: another model has the name {name!r}", err=True)
    if not library.names():
        pull = command("pull starter", settings.home)
        click.echo(f"mlxpool: no model on this machine yet: {pull} fetches a small one (93 MB)", err=True)
    if settings.startup_model is not None:
        try:
            library.resolve(settings.startup_model)
        except ApiError as problem:
            raise click.UsageError(f"--model: {problem.message}") from None
