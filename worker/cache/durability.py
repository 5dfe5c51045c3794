"""Bringing to disk all that memory holds, for a flush or a drain. Event loop; the engine's thread hands the
writer its portions between steps, so running streams go on."""

from __future__ import annotations

import asyncio
import time

import mlx.core as mx

from mlxpool.shared.control import DrainReport
from mlxpool.worker import load
from mlxpool.worker.engine.engine import Engine

# How long a share may take to shrink: two gigabytes on a slow disk.
SHRINK_S = 30.0


async def flush(engine: Engine, timeout_s: float) -> DrainReport:
    """Write what is not on disk, for at most that long. Where nothing was ever to be on disk, all is well."""
    cache = engine.cache
    if cache is None or (cache.tier is None and cache.lost_disk is None):
        return DrainReport(durable=True)
    began_s = time.monotonic()
    writer = cache.writer
    spilled = 0 if writer is None else writer.spills
    unwritten = await engine.call(cache.unwritten)
    while writer is not None and unwritten:
        left = await engine.call(lambda: cache.offer_some(unwritten))
        rest_s = timeout_s - (time.monotonic() - began_s)
        await asyncio.to_thread(writer.flush, max(0.0, rest_s))
        if not left or rest_s <= 0:
            break
    missing = len(await engine.call(cache.unwritten))
    return DrainReport(
        durable=missing == 0,
        flushed=0 if writer is None else writer.spills - spilled,
        missing=missing,
        dropped=0 if writer is None else writer.dropped,
        failed=0 if writer is None else writer.failed,
        elapsed_ms=(time.monotonic() - began_s) * 1000,
    )


async def set_ram_bytes(engine: Engine, ram_bytes: int, memory_limit_bytes: int) -> None:
    """Another share of memory: over once no more is held, what had to be written first included, or after
    SHRINK_S. memory_limit_bytes: of everything else."""
    cache = engine.cache
    if cache is None:
        return

    def change() -> None:
        cache.set_max_bytes(ram_bytes)
        load.set_memory_limits(memory_limit_bytes + ram_bytes)

    await engine.call(change)
    if cache.writer is not None and cache.writer.pending_bytes:
        await asyncio.to_thread(cache.writer.flush, SHRINK_S)
        # What is written is let go of by the writer's thread; MLX keeps its memory until told.
        await engine.call(mx.clear_cache)
