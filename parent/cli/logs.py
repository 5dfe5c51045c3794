"""`mlxpool logs`: the log files of the workers, followed across rotation."""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

import click

from mlxpool.parent.cli.common import Failure, read_settings, settings_options
from mlxpool.parent.cli.completion import complete_model
from mlxpool.parent.pool.worker_log import log_path
from mlxpool.shared.config_values import known

_POLL_S = 0.2


@click.command("logs")
@click.argument("model", required=False, shell_complete=complete_model)
@click.option("-f", "--follow", is_flag=True, help="Go on printing what is written.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Last lines.")
@settings_options
def logs_command(
    model: str | None, follow: bool, lines: int, config_file: Path | None, home: Path | None
) -> int:
    """Show what the workers of MODEL have written; without MODEL, those of every model."""
    settings = read_settings(config_file, {"home": home})
    folder = settings.home / "logs"
    logs = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not logs:
        raise Failure(f"no logs in {folder} yet")
    if model is not None:
        path = log_path(folder, model)
        if path.stem not in logs:
            raise Failure(f"no log of {model!r} in {folder}; {known(path.stem, logs)}")
        logs = {path.stem: path}
    tails = {name: _Tail(path) for name, path in logs.items()}
    printer = _Printer(headed=len(tails) > 1)
    for name, tail in tails.items():
        printer.show(name, list(deque(tail.lines(), maxlen=lines)))
    while follow:
        time.sleep(_POLL_S)
        for name, tail in tails.items():
            printer.show(name, tail.lines())
    return 0


class _Printer:
    """Prints lines, with the log's name above them whenever that changes and there is more than one."""

    def __init__(self, *, headed: bool) -> None:
        self._headed = headed
        self._last: str | None = None

    def show(self, name: str, lines: list[str]) -> None:
        if not lines:
            return
        if self._headed and name != self._last:
            click.echo(f"==> {name} <==")
        self._last = name
        for line in lines:
            click.echo(line)


class _Tail:
    """What was written to one log since the last look. Owns its open file; starts over when rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def lines(self) -> list[str]:
        """Complete lines since the last call, of the rotated file too."""
        found = self._read()
        if self._was_rotated():
            assert self._file is not None
            self._file.close()
            self._file, self._rest = None, b""
            found += self._read()
        return found

    def _read(self) -> list[str]:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return []
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def _was_rotated(self) -> bool:
        if self._file is None:
            return False
        opened = os.fstat(self._file.fileno())
        try:
            named = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (named.st_dev, named.st_ino) != (opened.st_dev, opened.st_ino) or (
            named.st_size < self._file.tell()
        )
