"""Taking a model off the disk.

Only what lies in home/models is ours to remove; everything else is named and left alone. A model goes in two
steps: its folder is renamed to a hidden name, which ends it as a model at once, and what has that name is
then deleted. A removal that is killed half-way leaves a hidden folder, never half a model, and the next
removal deletes that too. A link is removed, never what it leads to.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from mlxpool.parent.library import HF_SOURCE, MODELS_FOLDER, LibraryModel
from mlxpool.shared import staging
from mlxpool.shared.config_values import is_model_name

TRASH_PREFIX = ".trash-"


def refusal(model: LibraryModel) -> str | None:
    """Why a model is not removed by us, and how it could be; None where it is."""
    if model.source == "home":
        return None
    if model.source == "config":
        why = f"the config file names its folder; take its path out of [models.{model.name!r}]"
    elif model.source == HF_SOURCE:
        remove = f"`hf cache rm model/{model.name}` removes it"
        why = f"it lies in the Hugging Face cache, which others use too; {remove}"
    else:
        why = f"it lies in {model.source}, which was given with --models; remove it there"
    return f"{model.name} is not mlxpool's to remove: {why}"


def unlist(model: LibraryModel, home: Path) -> Path:
    """Rename a model of home/models out of sight; returns what `delete` is to be given. Raises OSError."""
    models = home / MODELS_FOLDER
    trash = models / f"{TRASH_PREFIX}{secrets.token_hex(8)}"
    os.rename(model.path, trash)
    if model.path.parent != models:
        try:
            model.path.parent.rmdir()
        except OSError:
            pass  # the publisher has other models
    return trash


def delete(trash: Path) -> None:
    """Delete what `unlist` returned, and what removals that were killed have left. Raises OSError."""
    for path in sorted(trash.parent.glob(f"{TRASH_PREFIX}*")):
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=path != trash)


def find_stage(home: Path, name: str) -> Path | None:
    """What an unfinished pull of `name` has left, None where there is nothing."""
    if not is_model_name(name):
        return None
    stage = staging.stage_folder(home / MODELS_FOLDER, name)
    return stage if stage.is_dir() else None


def delete_stage(home: Path, name: str) -> tuple[Path, int]:
    """Delete that; returns it and the bytes it had. Raises PullError where the pull is under way, OSError."""
    models = home / MODELS_FOLDER
    stage = staging.stage_folder(models, name)
    with staging.locked(models, name, None):
        freed_bytes = size_bytes(stage)
        shutil.rmtree(stage)
    return stage, freed_bytes


def size_bytes(folder: Path) -> int:
    """Of the files in a folder and below it; a link counts as nothing, because it is not followed."""
    if folder.is_symlink():
        return 0
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
