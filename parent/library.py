"""Which models exist on this machine, by which names they answer, and whether they fit.

A model is a folder with a config.json: in home/models or a folder given with --models (folders.py), named by
a `[models."name"] path`, or in the Hugging Face cache (hf_cache.py). A name from a client is only ever looked
up among the names found; it never becomes part of a path. Folders are looked at again at every question, by
the times of the folders alone, so a model that was just pulled is there without a restart.

The library owns its scan and its cache of descriptions. It is used by one thread, the parent's event loop;
`describe` reads a few kilobytes per weight file when a folder has changed, and nothing otherwise; of streamed
models it may be megabytes, which `look` reads ahead on a thread.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from mlxpool.parent import folders, hf_cache, hints
from mlxpool.parent.strangers import contained
from mlxpool.shared import adapters, checkpoint, errors, memory
from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri.folder import RECORDS_FOLDER, is_only_streamed, is_records
from mlxpool.shared.colibri.folder import stamp as stamp_of
from mlxpool.shared.config import ModelSettings, Settings
from mlxpool.shared.model_facts import ModelFacts, model_facts
from mlxpool.shared.text import cut

if TYPE_CHECKING:
    # Imported where a streamed model is met: the others have no time for it at their server's start.
    from mlxpool.parent import streaming
    from mlxpool.shared.colibri.launch import StreamLaunch
    from mlxpool.shared.colibri.plan import StreamPlan

MODELS_FOLDER = "models"
HF_SOURCE = "hf"
# The name that was asked for goes on to the worker in a header, percent-encoded: up to 12 bytes each.
MAX_ASKED_CHARS = 512
# How many names an error about an unknown model lists.
_NEAR_NAMES = 3


class LibraryModel(msgspec.Struct, frozen=True):
    """One model found here. source: "home", "config", "hf" or the --models folder it lies in.

    settings: its own, with [pool] and [defaults] filled in.
    """

    name: str
    path: Path
    source: str
    settings: ModelSettings


class Resolved(msgspec.Struct, frozen=True):
    """What a request's name means. adapter: of `model:adapter`, as `adapters.read_set` reads it."""

    model: LibraryModel
    adapter: str | None = None


class Description(msgspec.Struct, frozen=True):
    """What is known of a model's folder: its plan, or why it can't be loaded. size_bytes: of its files.

    stream, launch: where its experts are streamed, the plan in its own lines and how a worker is to do it.
    """

    plan: memory.MemoryPlan | None
    fault: str | None
    stamp: str
    model_type: str = ""
    size_bytes: int = 0
    stream: StreamPlan | None = None
    launch: StreamLaunch | None = None


class Fit(msgspec.Struct, frozen=True):
    """What a model needs. stream: in its own lines, where its experts are streamed."""

    plan: memory.MemoryPlan
    stream: StreamPlan | None = None
    launch: StreamLaunch | None = None


class _Folder(msgspec.Struct, frozen=True):
    """What a folder's files say, as they were under `stamp`. streamed: where its experts are, be it that it
    can't be held otherwise or that its settings say so. facts: where they are not."""

    stamp: str
    facts: ModelFacts | None
    fault: str | None
    model_type: str
    size_bytes: int
    streamed: streaming.Streamed | None = None


class Library:
    """The models of this machine under one set of settings."""

    def __init__(self, settings: Settings, hf_cache_folder: Path | None = None) -> None:
        """hf_cache_folder: the Hugging Face cache; None = where the environment says it is."""
        self._settings = settings
        self._roots = [
            (settings.home / MODELS_FOLDER, "home"),
            *((folder, str(folder)) for folder in settings.model_dirs),
        ]
        cache = hf_cache.location(os.environ) if hf_cache_folder is None else hf_cache_folder
        self._hf_cache = hf_cache.HfCache(cache)
        self.adapters = settings.home / adapters.ADAPTERS_FOLDER
        self._seen: tuple[folders.Times, list[folders.Found]] | None = None
        self._models: dict[str, LibraryModel] = {}
        self._shadowed: dict[str, list[Path]] = {}
        # With whether its settings have the experts streamed.
        self._folders: dict[tuple[Path, bool], _Folder] = {}
        self._described: dict[tuple[str, Backend, int | None], tuple[_Folder, object, Description]] = {}

    def use(self, settings: Settings) -> None:
        """Look at the models under other settings from now on; which folders are looked into stays."""
        self._settings = settings
        self._seen = None
        self._described.clear()

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
        """The model a request means; see `resolved`."""
        return self.resolved(asked).model

    def folders(self) -> list[Path]:
        """Where models are found, and where the settings say that some are."""
        return [root for root, _ in self._roots] + [
            Path(own.path) for own in self._settings.models.values() if own.path
        ]

    def resolved(self, asked: str | None) -> Resolved:
        """The model a request means, and with which adapters: exact name, exact alias, `model:adapter`,
        longest matching pattern, or the default. An alias may lead to `model:adapter`.

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
        models = self._scan()
        if asked in models:
            return Resolved(models[asked])
        target = self._alias_target(asked, patterns=False)
        if target is None:
            adapted = self._adapted(asked)
            if adapted is not None:
                return adapted
            target = self._alias_target(asked)
        name = asked if target is None else target
        found = Resolved(models[name]) if name in models else None if target is None else self._adapted(name)
        if found is None:
            led = f" (alias of {cut(asked)!r})" if target else ""
            raise errors.error(
                "model_not_found",
                f"no model {cut(name)!r}{led} on this server; {self._some_names(name)}",
                param="model",
            )
        return found

    def _adapted(self, name: str) -> Resolved | None:
        """What `model:adapter` means, where there are such a model, or an alias of one, and such adapters."""
        of, colon, said = name.rpartition(":")
        if not colon or len(name) > MAX_ASKED_CHARS:
            return None
        model = self._scan().get(of) or self._scan().get(self._alias_target(of, patterns=False) or "")
        try:
            ids = adapters.read_set(said)
        except ValueError:
            return None
        if model is None or not all((self.adapters / adapter_id).is_dir() for adapter_id in ids):
            return None
        return Resolved(model, said)

    async def look(self) -> None:
        """Read what has changed and takes long, on a thread: a streamed model's headers take a second."""
        # Commands that ask nothing of a loop have no time for its import.
        import asyncio

        for model in self.models():
            key = _key(model)
            known = self._folders.get(key)
            if known is not None and known.streamed is None and not key[1]:
                # Whoever describes it looks at its files anyway.
                continue
            try:
                with contained(model.path):
                    stamp = stamp_of(model.path)
                    if self._knows(key, stamp) or not (key[1] or is_only_streamed(model.path)):
                        continue
            except checkpoint.CheckpointError:
                continue
            read = await asyncio.to_thread(_read_folder, *key, stamp)
            if not self._knows(key, stamp):
                self._folders[key] = read

    def describe(self, model: LibraryModel, backend: Backend, limit_bytes: int | None) -> Description:
        """The plan of one model within `limit_bytes`, or what is wrong with its folder. Never raises."""
        try:
            folder = self._folder(model)
        except checkpoint.CheckpointError as problem:
            return Description(None, str(problem), "")
        key = (model.name, backend, limit_bytes)
        known, found = self._described.get(key), self._tuned(folder)
        if known is not None and known[0] is folder and known[1] == found:
            return known[2]
        fit, fault = None, folder.fault
        try:
            if fault is None:
                fit = self._fit(model, folder, backend, limit_bytes, model.settings.context)
        except checkpoint.CheckpointError as problem:
            fault = str(problem)
        described = Description(None, fault, folder.stamp, folder.model_type, folder.size_bytes)
        if fit is not None:
            described = msgspec.structs.replace(
                described, plan=fit.plan, stream=fit.stream, launch=fit.launch
            )
        self._described[key] = folder, found, described
        return described

    def fit(self, model: LibraryModel, backend: Backend, limit_bytes: int | None, context: int | None) -> Fit:
        """What the model would need at `context` tokens; None = as its settings say.

        Raises CheckpointError where its folder can't be loaded.
        """
        folder = self._folder(model)
        if folder.fault is not None:
            raise checkpoint.CheckpointError(folder.fault)
        asked = model.settings.context if context is None else context
        return self._fit(model, folder, backend, limit_bytes, asked)

    def budget(self) -> memory.Budget:
        """The memory budget on this machine."""
        total_bytes = self._settings.budget_bytes(psutil.virtual_memory().total)
        return memory.split_budget(total_bytes, self._settings.cache.ram)

    def _folder(self, model: LibraryModel) -> _Folder:
        """What the files say, read again when they have changed. Raises CheckpointError if there are none."""
        with contained(model.path):
            stamp, key = stamp_of(model.path), _key(model)
        if not self._knows(key, stamp):
            self._folders[key] = _read_folder(*key, stamp)
        return self._folders[key]

    def _knows(self, key: tuple[Path, bool], stamp: str) -> bool:
        known = self._folders.get(key)
        return known is not None and known.stamp == stamp

    def _fit(
        self,
        model: LibraryModel,
        folder: _Folder,
        backend: Backend,
        limit_bytes: int | None,
        context: int | None,
    ) -> Fit:
        """Raises CheckpointError where the settings and the folder don't go together."""
        with contained(model.path):
            return self._planned(model, folder, backend, limit_bytes, context)

    def _planned(
        self,
        model: LibraryModel,
        folder: _Folder,
        backend: Backend,
        limit_bytes: int | None,
        context: int | None,
    ) -> Fit:
        own, explicit = model.settings, self._settings.budget_is_explicit
        if folder.streamed is not None:
            from mlxpool.parent import streaming

            plan, launch = streaming.plan_of(
                folder.streamed,
                own,
                self._settings.home,
                backend=backend,
                limit_bytes=limit_bytes,
                limit_is_explicit=explicit,
                context=context,
            )
            return Fit(plan.memory_plan, plan, launch)
        assert folder.facts is not None
        plain = memory.plan(
            folder.facts,
            backend=backend,
            context=context,
            batch=own.rows(streamed=False),
            limit_bytes=limit_bytes,
            limit_is_explicit=explicit,
            prefill_chunk=own.prefill_chunk,
        )
        return Fit(plain)

    def _tuned(self, folder: _Folder) -> object:
        """Changes when what was tuned of streamed models does."""
        if folder.streamed is None:
            return None
        from mlxpool.parent import streaming

        return streaming.tuned_stamp(self._settings.home)

    def _alias_target(self, asked: str, patterns: bool = True) -> str | None:
        """Where the aliases lead: an exact one first, else the pattern with the most literal characters."""
        aliases = self._settings.aliases
        if len(asked) > MAX_ASKED_CHARS:
            return None
        if asked in aliases and "*" not in asked:
            return aliases[asked]
        if not patterns:
            return None
        matching = [pattern for pattern in aliases if "*" in pattern and _matches(pattern, asked)]
        if not matching:
            return None
        return aliases[max(matching, key=lambda pattern: (len(pattern.replace("*", "")), pattern))]

    def _some_names(self, name: str) -> str:
        """The names nearest to `name`, else some of those there are."""
        of, colon, _ = name.rpartition(":")
        if colon and of in self._scan():
            return f"model {cut(of)!r} is here; {adapters.some(adapters.listing(self.adapters))}"
        known = [*self.names(), *(alias for alias in self._settings.aliases if "*" not in alias)]
        if not known:
            pull = hints.command("pull starter", self._settings.home)
            return f"there are no models here yet: {pull} fetches a small one"
        near = difflib.get_close_matches(cut(name), known, n=_NEAR_NAMES, cutoff=0.5)
        if near:
            return f"did you mean {', '.join(near)}?"
        more = ", …" if len(known) > _NEAR_NAMES else ""
        return f"there are {', '.join(known[:_NEAR_NAMES])}{more}"

    def _scan(self) -> dict[str, LibraryModel]:
        """The models by name, read again when a folder's time of change moved."""
        cached = self._hf_cache.models()
        if (
            self._seen is not None
            and self._seen[1] is cached
            and folders.times(self._seen[0]) == self._seen[0]
        ):
            return self._models
        models: dict[str, LibraryModel] = {}
        shadowed: dict[str, list[Path]] = {}
        # A path in the config is the user's own word for that name, so it comes before what lies around.
        # It is listed even where no folder is there, so that `describe` can say so.
        for name, entry in self._settings.models.items():
            if entry.path:
                models[name] = LibraryModel(name, Path(entry.path), "config", self._settings.model(name))
        scans = [(folders.scan(root), source) for root, source in self._roots]
        scans.append((folders.Scan(cached, []), HF_SOURCE))
        for scan, source in scans:
            for name, path in scan.found:
                if name in models:
                    shadowed.setdefault(name, []).append(path)
                else:
                    models[name] = LibraryModel(name, path, source, self._settings.model(name))
        seen = folders.times(path for scan, _ in scans for path in scan.watched)
        self._seen = (seen, cached) if folders.is_settled(seen) else None
        self._models, self._shadowed = models, shadowed
        return models


def _key(model: LibraryModel) -> tuple[Path, bool]:
    """What a folder's description is kept by: the same files say other things of experts that stream."""
    return model.path, model.settings.experts == "stream"


def _read_folder(path: Path, chosen: bool, stamp: str) -> _Folder:
    """Reads headers once. chosen: whether settings have the experts streamed."""
    size_bytes, only = 0, False
    try:
        with contained(path):
            size_bytes = _size_bytes(path)
            only = is_only_streamed(path)
            if only or chosen:
                from mlxpool.parent import streaming

                streamed = streaming.read(path, only=only)
                return _Folder(stamp, None, None, streamed.artifact.model_type, size_bytes, streamed)
            read = checkpoint.read(path)
            return _Folder(stamp, model_facts(read), None, read.model_type, size_bytes)
    except checkpoint.CheckpointError as problem:
        fault = f'experts = "stream": {problem}' if chosen and not only else str(problem)
        return _Folder(stamp, None, fault, "", size_bytes)


def _size_bytes(path: Path) -> int:
    """Of the files in a folder, converted experts in their own among them."""
    folders_of = [path, path / RECORDS_FOLDER] if is_records(path) else [path]
    return sum(file.stat().st_size for one in folders_of for file in one.iterdir() if file.is_file())


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
