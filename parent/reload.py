"""Hot reload: what a changed config may change while models serve, and what has to wait for a restart.

`compare` is the decision, pure. `Reloader` carries it out: the library, the pool and the edge take the new
settings; a live worker whose model is gone or is to be served differently is unloaded once the requests it
has are served, and the next request loads it anew; everything else stays as it is. A config that can't be
read changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from mlxpool.shared.config import ModelSettings, Settings
from mlxpool.shared.trace import FILE_NAME, TraceFile

from .edge.trace import Trace
from .history.store import HistoryStore
from .library import Library
from .pool.service import PoolService

logger = logging.getLogger("mlxpool")

# Bound when the process started, or what other things were found by.
_RESTART_ONLY = ("server.host", "server.port")
_SECTIONS = ("server", "pool", "cache", "history", "colibri", "defaults")


class Difference(msgspec.Struct, frozen=True):
    """Answer of `POST /api/config/reload`. Names of keys, sorted: in effect now; only after a restart."""

    changed: list[str]
    needs_restart: list[str]


def compare(old: Settings, new: Settings) -> Difference:
    """Which keys differ, by when they take effect."""
    keys = []
    for section in _SECTIONS:
        before, after = getattr(old, section), getattr(new, section)
        keys += [
            f"{section}.{n}" for n in before.__struct_fields__ if getattr(before, n) != getattr(after, n)
        ]
    keys += [
        f"aliases.{name}"
        for name in {*old.aliases, *new.aliases}
        if old.aliases.get(name) != new.aliases.get(name)
    ]
    for name in {*old.models, *new.models}:
        before, after = (settings.models.get(name, ModelSettings()) for settings in (old, new))
        keys += [
            f"models.{name}.{field}"
            for field in before.__struct_fields__
            if getattr(before, field) != getattr(after, field)
        ]
    for name in ("home", "model_dirs"):
        if getattr(old, name) != getattr(new, name):
            keys.append(name)
    later = {*_RESTART_ONLY, "home", "model_dirs"}
    return Difference(sorted(k for k in keys if k not in later), sorted(k for k in keys if k in later))


def merge(old: Settings, new: Settings) -> Settings:
    """The new settings with what needs a restart left as it is."""
    server = msgspec.structs.replace(new.server, host=old.server.host, port=old.server.port)
    return msgspec.structs.replace(
        new, server=server, home=old.home, model_dirs=old.model_dirs, startup_model=old.startup_model
    )


class Live:
    """The settings in effect. Whoever must follow a reload reads them here, each time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings


class Reloader:
    """Reads the settings again and hands them round."""

    def __init__(
        self,
        live: Live,
        read: Callable[[], Settings],
        library: Library,
        pool: PoolService,
        trace: Trace,
        history: HistoryStore,
    ) -> None:
        """read: the settings as the command line and the environment of this process make them now."""
        self._live = live
        self._read = read
        self._library = library
        self._pool = pool
        self._trace = trace
        self._history = history

    def reload(self) -> Difference:
        """Take over what may change. Raises ConfigError, and then nothing has changed."""
        old, new = self._live.settings, self._read()
        difference = compare(old, new)
        merged = self._live.settings = merge(old, new)
        self._library.use(merged)
        self._pool.use(merged)
        if merged.history != old.history:
            self._history.limits_changed()
        if merged.server.trace != old.server.trace:
            switch_trace(self._trace, merged)
        logger.info(
            "config: changed %s; after a restart: %s",
            ", ".join(difference.changed) or "nothing",
            ", ".join(difference.needs_restart) or "nothing",
        )
        return difference


def switch_trace(trace: Trace, settings: Settings) -> None:
    """Open or close the trace as the settings want it; a file that can't be opened costs the trace alone."""
    if not settings.server.trace:
        trace.switch(None)
        return
    path = settings.home / "logs" / FILE_NAME
    try:
        trace.switch(TraceFile(path))
    except OSError as err:
        logger.error("no trace: %s can't be written: %s", path, err)
