"""Settings: what the user may choose, its default and the reason for it, and where each value came from.

Four layers, later ones win: the defaults below, a TOML file, environment variables named
MLXPOOL_<SECTION>_<KEY>, command-line flags. A key is declared once, as a struct field annotated with its
`Key` (how its value is read and why its default is what it is); the file reader, the JSON schema and
docs/configuration.md are made from that. Nothing is ignored: an unknown section, key or variable, and a
key that belongs to a later version, is a `ConfigError` that says what would work.

`load` reads the file and nothing else; settings are immutable once made.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec

from mlxpool.shared import config_file
from mlxpool.shared import config_values as v
from mlxpool.shared.colibri.settings import Colibri, ModelColibri
from mlxpool.shared.config_values import ConfigError, Key, refuse
from mlxpool.shared.text import is_unicode
from mlxpool.shared.units import parse_budget

__all__ = [
    "Cache",
    "Colibri",
    "ConfigError",
    "Defaults",
    "History",
    "ModelSettings",
    "Pool",
    "Server",
    "Settings",
    "default_home",
    "json_schema",
    "keys_of",
    "load",
]

HOME_VARIABLE = "MLXPOOL_HOME"
_PREFIX = "MLXPOOL_"
KV_FOLDER = "kv"


class Server(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[server]: where the parent listens and whom it answers."""

    host: Annotated[
        str, Key(v.HOST, "Loopback only: a model server has no business on a network unless asked to.")
    ] = "127.0.0.1"
    port: Annotated[
        int, Key(v.PORT, "One stable port for every model. 0 picks a free one and prints it.")
    ] = 8420
    api_keys: Annotated[
        tuple[str, ...],
        Key(v.API_KEYS, "Empty: no key is asked for. Needed as soon as `host` is not loopback."),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Key(v.HOSTS, "Host headers answered besides loopback names: others are how DNS rebinding gets in."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Key(v.ORIGINS, "Web origins that may call the server from a browser besides its own pages."),
    ] = ()
    trace: Annotated[
        bool,
        Key(v.FLAG, "A line per request and process in logs/trace.jsonl; it grows, so only when asked for."),
    ] = False


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[pool]: how much memory models may hold and how long anything may take. Durations in seconds."""

    memory_budget: Annotated[
        str | int,
        Key(v.BUDGET, "A quarter of the machine is left to the user's own programs."),
    ] = "75%"
    idle_ttl: Annotated[
        float,
        Key(v.TTL, "Longer than a pause in a conversation, shorter than a lunch break."),
    ] = 900.0
    load_timeout: Annotated[
        float,
        Key(v.TIMEOUT, "Time without loading progress, so that a slow disk alone never reaches it."),
    ] = 600.0
    queue_limit: Annotated[
        int,
        Key(v.COUNT, "Waiting requests per model; more than this is a client retrying, answered with 429."),
    ] = 64
    queue_timeout: Annotated[
        float,
        Key(v.TIMEOUT, "About as long as clients themselves wait before they give up."),
    ] = 600.0
    stall_timeout: Annotated[
        float,
        Key(v.TIMEOUT, "Work pending and no step done: over twice the slowest single step measured, 23 s."),
    ] = 60.0
    spare_worker: Annotated[
        bool,
        Key(v.FLAG, "One worker that has imported everything waits: a switch then costs the weights alone."),
    ] = True
    drain_timeout: Annotated[
        float,
        Key(v.WAIT, "What a long answer needs to finish when the server is told to stop."),
    ] = 120.0


class Cache(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[cache]: what is kept of prompts that have been read, for the next one that begins the same. Bytes and
    seconds."""

    ram: Annotated[
        int,
        Key(v.SIZE, "Of all models together, off the memory budget, at most a quarter of it. 0: none."),
    ] = 8_000_000_000
    ssd: Annotated[
        bool, Key(v.FLAG, "Long prompts outlive evictions and restarts: reading them anew takes minutes.")
    ] = True
    ssd_budget: Annotated[
        int, Key(v.SIZE, "Of all models together: some hundred thousand tokens of an 8B model.")
    ] = 32_000_000_000
    idle_demote: Annotated[
        float, Key(v.TTL, "What was not asked for so long is left to the disk, and its memory given back.")
    ] = 300.0
    verify: Annotated[
        bool, Key(v.FLAG, "Hashes of all bytes are checked as they are read, faster than any disk reads.")
    ] = True
    spill_queue: Annotated[
        int, Key(v.SIZE, "What may wait to be written, always one record; more than that is dropped.")
    ] = 2_000_000_000

    @property
    def is_on_disk(self) -> bool:
        """Whether prompts are kept on disk at all."""
        return self.ssd and self.ssd_budget > 0


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[history]: how long and how much of what /v1/responses answered is kept. Seconds and bytes."""

    max_age: Annotated[
        float, Key(v.AGE, "A conversation that rested for a month is begun anew. 0: nothing is kept.")
    ] = 2_592_000.0
    max_bytes: Annotated[
        int,
        Key(v.SIZE, "On disk, compressed: ten thousand long answers. Oldest out first. 0: nothing is kept."),
    ] = 512 * 2**20


class Defaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """[defaults]: what a request that does not say gets. None leaves it to the model's own folder."""

    model: Annotated[
        str | None, Key(v.MODEL_NAME, "Unset: a request without `model` is refused, never guessed.")
    ] = None
    max_tokens: Annotated[int | None, Key(v.COUNT, "Unset: until the model ends or its context is full.")] = (
        None
    )
    temperature: Annotated[
        float | None, Key(v.TEMPERATURE, "Unset: the model folder's generation_config.json, else 0.7.")
    ] = None
    top_p: Annotated[
        float | None, Key(v.TOP_P, "Unset: the model folder's generation_config.json, else 1.")
    ] = None
    top_k: Annotated[
        int | None, Key(v.TOP_K, "Unset: the model folder's generation_config.json, else off (0).")
    ] = None
    thinking: Annotated[
        bool | None, Key(v.FLAG, "Unset: the model's own default. Of models that can reason or not, as told.")
    ] = None


# Of a model whose experts are all in memory.
DEFAULT_BATCH = 8


class ModelSettings(ModelColibri, frozen=True, forbid_unknown_fields=True):
    """[models."name"]: one model's own choices. None inherits [pool], [defaults] or [colibri]."""

    path: Annotated[
        str | None,
        Key(v.PATH, "Unset: the folder of that name among the models found. Relative to the config file."),
    ] = None
    pin: Annotated[
        bool, Key(v.FLAG, "Pinned models are never evicted and never idle out: a choice, not a default.")
    ] = False
    idle_ttl: Annotated[float | None, Key(v.TTL, "Unset: [pool] idle_ttl.")] = None
    context: Annotated[
        int | None,
        Key(
            v.COUNT,
            "Tokens. Unset: the model's own, at most 32,768, so that one row's KV stays modest. More than "
            "the model has is lowered to that, and told with its plan.",
        ),
    ] = None
    batch: Annotated[
        int | None,
        Key(
            v.BATCH,
            "Rows decoded together. Unset: 8, five times one row's tokens; 1 where experts are streamed.",
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        Key(v.CHUNK, "Tokens. Unset: the worker measures what keeps a chunk at 0.4 s or less."),
    ] = None
    max_tokens: Annotated[int | None, Key(v.COUNT, "Unset: [defaults] max_tokens.")] = None
    temperature: Annotated[float | None, Key(v.TEMPERATURE, "Unset: [defaults] temperature.")] = None
    top_p: Annotated[float | None, Key(v.TOP_P, "Unset: [defaults] top_p.")] = None
    top_k: Annotated[int | None, Key(v.TOP_K, "Unset: [defaults] top_k.")] = None
    thinking: Annotated[bool | None, Key(v.FLAG, "Unset: [defaults] thinking.")] = None
    tool_parser: Annotated[
        str | None, Key(v.TOOL_FAMILY, "Unset: told from the model's chat template and vocabulary.")
    ] = None
    reasoning_parser: Annotated[
        str | None, Key(v.REASONING_FAMILY, "Unset: told from the model's chat template and vocabulary.")
    ] = None
    adapters: Annotated[
        str | None,
        Key(v.ADAPTERS, 'Unset: the model as it is. A request\'s `adapter: "none"` switches it off.'),
    ] = None

    def rows(self, *, streamed: bool) -> int:
        """Rows decoded together."""
        return self.batch or (1 if streamed else DEFAULT_BATCH)


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "server": Server,
    "pool": Pool,
    "cache": Cache,
    "history": History,
    "colibri": Colibri,
    "defaults": Defaults,
}
_ALL_SECTIONS = [*SECTIONS, "aliases", "models"]

# Named in the design, built later: refused with that reason, so that nobody believes they took effect.
_LATER_KEYS = {"models": {"kv_bits", "kv_budget", "draft"}}


class Settings(msgspec.Struct, frozen=True):
    """Everything chosen, with where each choice came from.

    home: the data folder. model_dirs: folders given with --models, searched after home/models.
    startup_model: loaded at start. origins: "section.key" → the source that set it; what is missing there
    is a default.
    """

    server: Server = Server()
    pool: Pool = Pool()
    cache: Cache = Cache()
    history: History = History()
    colibri: Colibri = Colibri()
    aliases: dict[str, str] = {}
    defaults: Defaults = Defaults()
    models: dict[str, ModelSettings] = {}
    home: Path = Path()
    model_dirs: tuple[Path, ...] = ()
    startup_model: str | None = None
    config_path: Path | None = None
    origins: dict[str, str] = {}

    @property
    def budget_is_explicit(self) -> bool:
        """Whether the user chose the memory budget: only then does it lower a model's context."""
        return "pool.memory_budget" in self.origins or self.pool.memory_budget != Pool().memory_budget

    def budget_bytes(self, total_memory_bytes: int) -> int:
        """The memory budget in bytes on a machine with that much memory."""
        return parse_budget(self.pool.memory_budget, total_memory_bytes)

    def model(self, name: str) -> ModelSettings:
        """The settings of one model with [pool], [defaults] and [colibri] filled in; `path` is its own."""
        own = self.models.get(name, ModelSettings())
        inherited: dict[str, object] = {}
        if own.idle_ttl is None:
            inherited["idle_ttl"] = self.pool.idle_ttl
        for key in ("max_tokens", "temperature", "top_p", "top_k", "thinking"):
            if getattr(own, key) is None:
                inherited[key] = getattr(self.defaults, key)
        for key in Colibri.__struct_fields__:
            if getattr(own, key) is None:
                inherited[key] = getattr(self.colibri, key)
        return msgspec.structs.replace(own, **inherited)

    @property
    def kv_folder(self) -> Path:
        """Where prompts are kept on disk, one folder per model."""
        return self.home / KV_FOLDER

    @property
    def client_key(self) -> str | None:
        """The key this machine's own commands use, where keys are asked for."""
        return self.server.api_keys[0] if self.server.api_keys else None


@functools.cache
def keys_of(section: type[msgspec.Struct]) -> dict[str, Key]:
    """The `Key` of each field of a section, in the order of the struct, inherited ones last."""
    hints = get_type_hints(section, include_extras=True)
    names = sorted(section.__struct_fields__, key=lambda name: name not in section.__annotations__)
    return {name: hints[name].__metadata__[0] for name in names}


def json_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of the config file."""

    def table(section: type[msgspec.Struct]) -> dict[str, Any]:
        empty = section()
        properties = {}
        for name, key in keys_of(section).items():
            default = getattr(empty, name)
            shown = {} if default is None else {"default": list(default) if default == () else default}
            properties[name] = {**key.kind.schema, "description": key.why, **shown}
        return {"type": "object", "additionalProperties": False, "properties": properties}

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mlxpool config.toml",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: table(section) for name, section in SECTIONS.items()},
            "aliases": {"type": "object", "additionalProperties": {"type": "string", "minLength": 1}},
            "models": {"type": "object", "additionalProperties": table(ModelSettings)},
        },
    }


def default_home(env: Mapping[str, str] | None = None) -> Path:
    """The home of commands that are not told another one. env: None takes the process's."""
    named = (os.environ if env is None else env).get(HOME_VARIABLE)
    return Path(named or "~/.mlxpool").expanduser().absolute()


def load(
    path: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Settings from file < environment < flags.

    path: a config file that must exist; None takes home/config.toml if there is one. env: None takes the
    process's. flags: "section.key", "home", "models" (folders) or "model" → value; None values are unset.
    Raises ConfigError.
    """
    env = os.environ if env is None else env
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    named_home = given.pop("home", None)
    home = default_home(env) if not named_home else Path(str(named_home)).expanduser().absolute()
    if not is_unicode(str(home)):
        raise ConfigError(f"home: {str(home)!a} is not valid UTF-8; use another folder")
    if path is None:
        path = config_file.find(home)

    tables = _read_file(path) if path is not None else {}
    values: dict[str, dict[str, object]] = {name: {} for name in SECTIONS}
    origins: dict[str, str] = {}
    for section in SECTIONS:
        source = str(path)
        for name, raw in _table(tables.get(section, {}), source, section).items():
            values[section][name] = _read(section, name, raw, source, f"{section}.{name}")
            origins[f"{section}.{name}"] = source
    for variable, section, name in _variables(env):
        values[section][name] = _read(section, name, env[variable], "environment", variable, text=True)
        origins[f"{section}.{name}"] = variable
    model_dirs = _model_dirs(given.pop("models", ()))
    startup_model = given.pop("model", None)
    for dotted, raw in given.items():
        section, _, name = dotted.partition(".")
        if section not in SECTIONS:
            raise ConfigError(f"command line: unknown setting {dotted}; {v.known(section, SECTIONS)}")
        flag = f"--{name.replace('_', '-')}"
        is_text = isinstance(raw, str)
        values[section][name] = _read(section, name, raw, "command line", flag, text=is_text)
        origins[dotted] = flag

    settings = Settings(
        server=Server(**values["server"]),  # type: ignore[arg-type]  # read by each key's own reader
        pool=Pool(**values["pool"]),  # type: ignore[arg-type]
        cache=Cache(**values["cache"]),  # type: ignore[arg-type]
        history=History(**values["history"]),  # type: ignore[arg-type]
        colibri=Colibri(**values["colibri"]),  # type: ignore[arg-type]
        defaults=Defaults(**values["defaults"]),  # type: ignore[arg-type]
        aliases=_aliases(tables.get("aliases", {}), str(path)),
        models=_models(tables.get("models", {}), path, origins),
        home=home,
        model_dirs=model_dirs,
        startup_model=None if startup_model is None else str(startup_model),
        config_path=path,
        origins=origins,
    )
    if not v.is_loopback(settings.server.host) and not settings.server.api_keys:
        origin = origins["server.host"]
        source, label = {
            "--host": ("command line", origin),
            "MLXPOOL_SERVER_HOST": ("environment", origin),
        }.get(origin, (origin, "server.host"))
        way_out = "set server.api_keys too, or use a loopback address"
        raise refuse(source, label, settings.server.host, way_out)
    return settings


def _read_file(path: Path) -> dict[str, Any]:
    """The tables of the file, each of a known section. Raises ConfigError."""
    tables = config_file.read(path)
    for section in tables:
        if section not in _ALL_SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]; {v.known(section, _ALL_SECTIONS)}")
    return tables


def _table(raw: object, source: str, name: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise refuse(source, name, raw, f"write a table: [{name}]", secret=_may_hold_keys(raw))
    return raw


def _may_hold_keys(raw: object) -> bool:
    """Whether a value in a wrong place could have API keys in it."""
    return isinstance(raw, list | dict)


def _read(section: str, name: str, raw: object, source: str, label: str, *, text: bool = False) -> object:
    """One value, read by its key's kind; `label` is what the user wrote it under."""
    struct = ModelSettings if section == "models" else SECTIONS[section]
    key = keys_of(struct).get(name)
    if key is None:
        if name in _LATER_KEYS.get(section, ()):
            raise ConfigError(f"{source}: {label} is not in this version yet; remove it")
        raise ConfigError(f"{source}: unknown key {label}; {v.known(name, keys_of(struct))}")
    try:
        return key.kind.read(key.kind.from_text(raw) if text and isinstance(raw, str) else raw)
    except ValueError as problem:
        # A parser of units says more than "use …" does; plain readers raise without text.
        allowed = str(problem) or f"use {key.kind.allowed}"
        raise refuse(source, label, raw, allowed, secret=key.kind.secret) from None


def _variables(env: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    """(variable, section, key) of each MLXPOOL_ variable. Raises ConfigError on unknown ones."""
    names = {
        f"{_PREFIX}{section}_{name}".upper(): (section, name)
        for section, struct in SECTIONS.items()
        for name in keys_of(struct)
    }
    for variable in sorted(env):
        if not variable.startswith(_PREFIX) or variable == HOME_VARIABLE:
            continue
        if variable in names:
            yield variable, *names[variable]
            continue
        section, _, name = variable.removeprefix(_PREFIX).lower().partition("_")
        if name in _LATER_KEYS.get(section, ()):
            raise ConfigError(f"environment: {variable} is not in this version yet; unset it")
        # What all of them begin with makes none of them near.
        prefix = f"{_PREFIX}{section}_".upper() if section in SECTIONS else _PREFIX
        candidates = [known.removeprefix(prefix) for known in names if known.startswith(prefix)]
        if prefix == _PREFIX:
            candidates.append(HOME_VARIABLE.removeprefix(prefix))
        near = v.known(variable.removeprefix(prefix), candidates, prefix)
        raise ConfigError(f"environment: unknown {variable}; {near}")


def _model_dirs(raw: object) -> tuple[Path, ...]:
    folders = []
    for entry in raw if isinstance(raw, Iterable) and not isinstance(raw, str) else (raw,):
        folder = Path(str(entry)).expanduser().absolute()
        if not folder.is_dir():
            raise refuse("command line", "--models", str(entry), "name a folder that exists")
        folders.append(folder)
    return tuple(folders)


def _aliases(raw: object, source: str) -> dict[str, str]:
    """Alias or pattern → model. A target is a model, never a pattern or another alias."""
    table = _table(raw, source, "aliases")
    for name, target in table.items():
        label = f'aliases."{name}"'
        if any(mark in name for mark in "?[]") or not name.strip():
            allowed = "an alias is a name; * is its only wildcard"
            raise refuse(source, label, target, allowed, secret=_may_hold_keys(target))
        if not isinstance(target, str) or not target.strip() or "*" in target:
            raise refuse(source, label, target, "use the name of one model", secret=_may_hold_keys(target))
        if target in table:
            raise refuse(source, label, target, "an alias leads to a model, not to another alias")
    return dict(table)


def _models(raw: object, path: Path | None, origins: dict[str, str]) -> dict[str, ModelSettings]:
    source = str(path)
    models = {}
    for model, entries in _table(raw, source, "models").items():
        section = f'models."{model}"'
        if not v.is_model_name(model):
            raise ConfigError(f"{source}: [{section}] is no model name; use {v.MODEL_NAME.allowed}")
        values = {}
        for name, entry in _table(entries, source, section).items():
            values[name] = _read("models", name, entry, source, f"{section}.{name}")
            origins[f"{section}.{name}"] = source
        if path is not None and isinstance(values.get("path"), str):
            own = Path(str(values["path"])).expanduser()
            values["path"] = str(own if own.is_absolute() else path.absolute().parent / own)
        models[model] = ModelSettings(**values)  # type: ignore[arg-type]  # read by each key's own reader
    return models


def seconds_text(seconds: float) -> str:
    """A duration setting as a person would write it: "15m", "never"."""
    if math.isinf(seconds):
        return "never"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s"
