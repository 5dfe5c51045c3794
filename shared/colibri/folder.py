"""What a folder is by a cheap look: of a kind whose experts can only be streamed, or not.

Imports little: a server looks at every folder it finds, and most hold nothing of the kind.
"""

from __future__ import annotations

import os
from pathlib import Path

from mlxpool.shared import checkpoint

# What `mlxpool colibri convert` writes: an index, a file per layer of experts, and the rest.
RECORDS_INDEX = "experts.json"
RECORDS_FOLDER = "experts"
RECORDS_DENSE = "dense-*.safetensors"
# Of a conversion that goes on where it was: what has been written, with which parameters.
RECORDS_PROGRESS = "progress.json"
# colibri's own files.
CONTAINER_PATTERN = "out-*.safetensors"

# Architectures that mlx-lm's own class can't load: our model of them is made for streaming.
STREAMED_ARCHITECTURES = frozenset({"glm_moe_dsa"})

# Of a home: what streaming keeps there.
HOME_FOLDER = "colibri"


def is_container(folder: Path) -> bool:
    """Whether the folder holds colibri's own files; reading it may still refuse it."""
    return (
        not is_records(folder)
        and _any(folder, CONTAINER_PATTERN)
        and not _any(folder, checkpoint.WEIGHTS_PATTERN)
    )


def is_records(folder: Path) -> bool:
    """Whether the folder is what `mlxpool colibri convert` writes; reading it may still refuse it, and so it
    does where what has the index's name is no file."""
    return os.path.lexists(folder / RECORDS_INDEX)


def is_only_streamed(folder: Path) -> bool:
    """Whether the folder can't be held otherwise. Raises CheckpointError where it has no config."""
    config = checkpoint.read_config(folder / checkpoint.CONFIG_FILE)
    return config["model_type"] in STREAMED_ARCHITECTURES or is_container(folder) or is_records(folder)


def stamp(folder: Path) -> str:
    """As checkpoint.stamp, with the records' own files. Raises CheckpointError."""
    own = checkpoint.stamp(folder)
    return own + checkpoint.stamp(folder / RECORDS_FOLDER) if is_records(folder) else own


def _any(folder: Path, pattern: str) -> bool:
    return next(folder.glob(pattern), None) is not None
