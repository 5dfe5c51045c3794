"""What commands share: the options that choose settings, and how results and failures are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from mlxpool.shared.config import ConfigError, Settings, load

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


class Failure(click.ClickException):
    """The command could not do it: one line, exit code 1."""

    exit_code = 1


class Number(click.FloatRange):
    """A finite number within bounds. Comparisons let nan through, and JSON has no word for it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def settings_options(command: F) -> F:
    """--config and --home: which settings, and so which server, a command is about."""
    command = click.option(
        "--home", type=click.Path(path_type=Path), help="The data folder; else MLXPOOL_HOME, else ~/.mlxpool."
    )(command)
    return click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        help="A config file; else home/config.toml.",
    )(command)


def read_settings(config_file: Path | None, flags: Mapping[str, object]) -> Settings:
    """The settings in effect; a bad one is a usage error, exit code 2."""
    try:
        return load(config_file, None, flags)
    except ConfigError as problem:
        raise click.UsageError(str(problem)) from None


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people; numbers belong in --json."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text: a model's name is shown as it is, brackets and all.
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    if not console.is_terminal:
        # A pipe has no width; nothing is folded for it.
        console = Console(width=10_000)
    console.print(table)
