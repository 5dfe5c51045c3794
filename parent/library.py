"""Which models exist on this machine, by which names they answer, and whether they fit.

A model is a folder with a config.json: in home/models, in a folder given with --models, or named by a
`[models."name"] path`. A name from a client is only ever looked up among the names found; it never
becomes part of a path. Folders are looked at again at every question, by the times of the folders alone,
so a model that was just pulled is there without a restart.

The library owns its scan and its cache of descriptions. It is used by one thread, the parent's event loop;
`describe` reads a few kilobytes per weight file when a folder has changed, and nothing otherwise.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import msgspec
import psutil

from mlxpool.shared import checkpoint, errors, memory
from mlxpool.shared.backend import Backend
from mlxpool.shared.config import ModelSettings, Settings
from mlxpool.shared.config_values import is_model_name
from mlxpool.shared.model_facts import model_facts

MODELS_FOLDER = "models"
# How many names an error about an unknown model lists.
_NEAR_NAMES = 3


class LibraryModel(msgspec.Struct, frozen=True):
    """One model found here. source: "home", "config" or the --models folder it lies in.

    settings: its own, with [pool] and [defaults] filled in.
    """

    name: str
    path: Path
    source: str
    settings: ModelSettings


class Description(msgspec.Struct, frozen=True):
    """What is known of a model's folder: its plan, or why it can't be loaded."""

    plan: memory.MemoryPlan | None
    fault: str | None
    stamp: str
    model_type: str = ""


class Library:
    """The models of this machine under one set of settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._roots = [
            (settings.home / MODELS_FOLDER, "home"),
            *((folder, str(folder)) for folder in settings.model_dirs),
        ]
        self._seen: object = None
        self._models: dict[str, LibraryModel] = {}
        self._shadowed: dict[str, list[Path]] = {}
        self._described: dict[tuple[str, Backend, int | None], Description] = {}

    def names(self) -> list[str]:
        """Every model's name, sorted."""
        return sorted(self._scan())

    def models(self) -> list[LibraryModel]:
        """Every model, by name."""
        found = self._scan()
        return [found[name] for name in sorted(found)]

    def shadowed(self) -> dict[str, list[Path]]:
        """Folders that can't be reached because a model found earlier has their name."""
        self._scan()
        return dict(self._shadowed)

    def find(self, name: str) -> LibraryModel | None:
        """The model of exactly that name."""
        return self._scan().get(name)

    def resolve(self, asked: str | None) -> LibraryModel:
        """The model a request means: exact name, exact alias, longest matching pattern, or the default.

        Raises ApiError invalid_request where nothing was asked for and there is no default,
        model_not_found where nothing answers to the name.
        """
        if asked is None:
            if self._settings.defaults.model is None:
                raise errors.error(
                    "invalid_request",
                    "no model was named and the server has no default one; "
                    f"name one: {self._some_names('')}, or set [defaults] model",
                    param="model",
                )
            asked = self._settings.defaults.model
        target = self._alias_target(asked)
        found = self._scan().get(asked) or (self._scan().get(target) if target else None)
        if found is None:
            led = f" (alias of {asked!r})" if target else ""
            raise errors.error(
                "model_not_found",
                f"no model {target or asked!r}{led} on this server; {self._some_names(target or asked)}",
                param="model",
            )
        return found

    def describe(self, model: LibraryModel, backend: Backend, limit_bytes: int | None) -> Description:
        """The plan of one model within `limit_bytes`, or what is wrong with its folder. Never raises."""
        try:
            stamp = checkpoint.stamp(model.path)
        except checkpoint.CheckpointError as problem:
            return Description(None, str(problem), "")
        key = (model.name, backend, limit_bytes)
        known = self._described.get(key)
        if known is not None and known.stamp == stamp:
            return known
        described = self._describe(model, backend, limit_bytes, stamp)
        self._described[key] = described
        return described

    def budget_bytes(self) -> int:
        """The memory budget on this machine, in bytes."""
        return self._settings.budget_bytes(psutil.virtual_memory().total)

    def _describe(
        self, model: LibraryModel, backend: Backend, limit_bytes: int | None, stamp: str
    ) -> Description:
        try:
            read = checkpoint.read(model.path)
        except checkpoint.CheckpointError as problem:
            return Description(None, str(problem), stamp)
        own = model.settings
        planned = memory.plan(
            model_facts(read),
            backend=backend,
            context=own.context,
            batch=own.batch,
            limit_bytes=limit_bytes,
            limit_is_explicit=self._settings.budget_is_explicit,
            prefill_chunk=own.prefill_chunk,
        )
        return Description(planned, None, stamp, read.model_type)

    def _alias_target(self, asked: str) -> str | None:
        """Where the aliases lead: an exact one first, else the pattern with the most literal characters."""
        aliases = self._settings.aliases
        if asked in aliases and "*" not in asked:
            return aliases[asked]
        matching = [pattern for pattern in aliases if "*" in pattern and _matches(pattern, asked)]
        if not matching:
            return None
        return aliases[max(matching, key=lambda pattern: (len(pattern.replace("*", "")), pattern))]

    def _some_names(self, name: str) -> str:
        """The names nearest to `name`, else some of those there are."""
        known = [*self.names(), *(alias for alias in self._settings.aliases if "*" not in alias)]
        if not known:
            return "there are no models here yet: `mlxpool pull starter` fetches a small one"
        near = difflib.get_close_matches(name, known, n=_NEAR_NAMES, cutoff=0.5)
        if near:
            return f"did you mean {', '.join(near)}?"
        more = ", …" if len(known) > _NEAR_NAMES else ""
        return f"there are {', '.join(known[:_NEAR_NAMES])}{more}"

    def _scan(self) -> dict[str, LibraryModel]:
        """The models by name, read again when a folder's time of change moved."""
        seen = [_folder_time(root) for root, _ in self._roots]
        configured = [(name, entry.path) for name, entry in self._settings.models.items() if entry.path]
        if seen == self._seen:
            return self._models
        models: dict[str, LibraryModel] = {}
        shadowed: dict[str, list[Path]] = {}
        # A path in the config is the user's own word for that name, so it comes before what lies around.
        # It is listed even where no folder is there, so that `describe` can say so.
        for name, path in configured:
            models[name] = LibraryModel(name, Path(path), "config", self._settings.model(name))
        complete = True
        for root, source in self._roots:
            for folder in _model_folders(root):
                if not (folder / checkpoint.CONFIG_FILE).is_file():
                    complete = False
                elif folder.name in models:
                    shadowed.setdefault(folder.name, []).append(folder)
                else:
                    own = self._settings.model(folder.name)
                    models[folder.name] = LibraryModel(folder.name, folder, source, own)
        # A folder still being filled gets its config.json without its parent's time moving: look again.
        self._seen = seen if complete else None
        self._models, self._shadowed = models, shadowed
        return models


def _matches(pattern: str, name: str) -> bool:
    """Whether `name` is `pattern` with each * standing for any text; nothing else is special."""
    first, *rest = pattern.split("*")
    if not name.startswith(first) or not name.endswith(rest[-1]):
        return False
    position = len(first)
    for part in rest[:-1]:
        at = name.find(part, position)
        if at < 0:
            return False
        position = at + len(part)
    return position <= len(name) - len(rest[-1])


def _folder_time(folder: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(folder)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _model_folders(root: Path) -> list[Path]:
    """The visible folders in `root`, sorted; hidden ones are stages of a pull."""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return []
    return [entry for entry in entries if is_model_name(entry.name) and entry.is_dir()]
