"""The config file as TOML tables, or the line that says what is wrong with it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from mlxpool.shared.config_values import ConfigError
from mlxpool.shared.files import open_regular

CONFIG_FILE = "config.toml"


def find(home: Path) -> Path | None:
    """The home's own config file, None where there is none.

    Whatever has the name was meant to be read: a folder or a link into nowhere is an error, not an absence.
    """
    path = home / CONFIG_FILE
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # reading it says what is wrong
    return path


def read(path: Path) -> dict[str, Any]:
    """The tables of a file that must exist. Raises ConfigError, with the line of a syntax error."""
    if path == Path(os.devnull):
        return {}
    try:
        with open_regular(path) as file:
            text = file.read().decode()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except OSError as problem:
        raise ConfigError(f"{path}: can't be read: {problem.strerror}") from None
    except UnicodeDecodeError as problem:
        raise ConfigError(f"{path}: can't be read: {problem}") from None
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested too deeply") from None
    except ValueError as problem:
        # Besides tomllib's own: a number of more digits than Python reads.
        said = str(problem).replace("at end of document", f"at line {text.count(chr(10)) + 1}, the end")
        raise ConfigError(f"{path}: not valid TOML: {said}") from None
