"""Which folders of a folder are models, and which must be looked at again to know that it is still so.

A folder with a config.json is a model, and its folder's name is the model's name. One without may be a
publisher's: then its folders are looked at in the same way, and are named `org/name`, as pulls from the
Hub lay them down and other programs do. Hidden folders are stages of a pull and are never models.

Nothing is kept here. A caller that wants to keep a scan asks `times` about the scan's `watched` folders
before and after: as long as they are equal the scan holds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mlxpool.shared.checkpoint import CONFIG_FILE
from mlxpool.shared.config_values import is_model_name

# A folder's time has the resolution of the kernel's clock tick: what is created right after a scan may leave
# the time as the scan saw it. So a time that is younger than this proves nothing.
RACY_S = 0.05

Times = dict[Path, tuple[int, int] | None]


class Found(NamedTuple):
    """A model's folder and the name that its place gives it."""

    name: str
    path: Path


class Scan(NamedTuple):
    """watched: the folders in which a model could appear or from which one could go."""

    found: list[Found]
    watched: list[Path]


def scan(root: Path) -> Scan:
    """The models in a folder of models, sorted by name within each level."""
    found: list[Found] = []
    watched = [root]
    for entry in _visible_folders(root):
        if (entry / CONFIG_FILE).is_file():
            found.append(Found(entry.name, entry))
            continue
        watched.append(entry)
        for inner in _visible_folders(entry):
            if (inner / CONFIG_FILE).is_file():
                found.append(Found(f"{entry.name}/{inner.name}", inner))
            else:
                watched.append(inner)
    return Scan(found, watched)


def times(paths: Iterable[Path]) -> Times:
    """Identity and time of change of each path, None where there is none."""
    return {path: _time(path) for path in paths}


def is_settled(seen: Times) -> bool:
    """Whether equal times later will prove that nothing has changed since."""
    newest = max((when[1] for when in seen.values() if when is not None), default=0)
    return time.time_ns() - newest > RACY_S * 1e9


def _time(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _visible_folders(root: Path) -> Iterator[Path]:
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            if is_model_name(entry.name) and entry.is_dir():
                yield entry
        except OSError:
            continue
