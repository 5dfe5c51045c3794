"""Putting a worker's prompt cache together, once its model is loaded. Engine thread."""

from __future__ import annotations

import sys
from pathlib import Path

from mlxpool.shared.control import Launch
from mlxpool.worker.cache.fingerprint import fingerprint
from mlxpool.worker.cache.layers import layout_of
from mlxpool.worker.cache.prompt_cache import PromptCache
from mlxpool.worker.cache.ram import RamTier
from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.writer import Writer
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.terms import Loaded


def open_cache(launch: Launch, loaded: Loaded, backend: str, engine: Engine) -> PromptCache | None:
    """The cache that the launch asks for; None where it asks for none, and for a model whose caches are of a
    class that can't be stored."""
    asked = launch.cache
    if asked is None:
        return None
    layout = layout_of(loaded.make_cache())
    if layout is None:
        sys.stderr.write("this model's caches are of a kind that can't be stored: no prompt cache\n")
        sys.stderr.flush()
        return None
    ram = RamTier(asked.ram_bytes)
    if asked.folder is None:
        return PromptCache(layout, loaded.make_cache, ram, engine.nudge)
    mark = fingerprint(loaded.files, layout=layout, dtype=loaded.dtype, backend=backend, kv=loaded.dtype)
    tier = SsdTier(Path(asked.folder), mark, launch.model, asked.ssd_budget_bytes, asked.verify)
    tier.open()

    def wrote(piece: Piece, durable: bool) -> None:
        cache.wrote(piece, durable)

    writer = Writer(tier, asked.spill_queue_bytes, lambda: engine.busy, wrote)
    cache = PromptCache(layout, loaded.make_cache, ram, engine.nudge, tier, writer, asked.idle_demote_s)
    return cache
