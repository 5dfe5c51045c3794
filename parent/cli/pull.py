"""`mlxpool pull starter`: the starter model with a progress bar a stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import click

from mlxpool.parent import starter
from mlxpool.parent.cli.common import Failure, json_option, print_json, read_settings, settings_options


@click.command("pull")
@click.argument("what")
@settings_options
@json_option
def pull_command(what: str, config_file: Path | None, home: Path | None, as_json: bool) -> int:
    """Fetch a model. This version knows one: `mlxpool pull starter`.

    A pull that was interrupted goes on where it was when it is run again.
    """
    if what != "starter":
        raise click.UsageError(f"can't pull {what!r}: this version pulls `starter` alone")
    settings = read_settings(config_file, {"home": home})
    try:
        folder = starter.published(settings.home)
        was_there = folder is not None
        if folder is None:
            with _progress(quiet=as_json) as report:
                folder = starter.pull(settings.home, report)
    except starter.PullError as problem:
        raise Failure(str(problem)) from None
    if as_json:
        print_json({"model": starter.MODEL_NAME, "path": folder, "was_there": was_there})
    elif was_there:
        click.echo(f"{starter.MODEL_NAME} is there already: {folder}")
    else:
        click.echo(f"{starter.MODEL_NAME} is ready: {folder}")
    return 0


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[starter.Report]:
    """A report that moves one bar per stage; on a pipe, one line when a stage begins."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
        return
    if not console.is_terminal:
        begun: set[str] = set()

        def tell(progress: starter.Progress) -> None:
            if progress.stage not in begun:
                begun.add(progress.stage)
                click.echo(f"{progress.stage} …", err=True)

        yield tell
        return
    columns = (TextColumn("{task.description:9}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, object] = {}

        def move(progress: starter.Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage, total=progress.total_bytes)
            bars.update(tasks[progress.stage], completed=progress.done_bytes, total=progress.total_bytes)  # type: ignore[arg-type]

        yield move
