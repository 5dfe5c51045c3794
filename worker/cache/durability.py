"""Bringing to disk all that memory holds, for a flush or a drain. Event loop; the engine's thread hands the
writer its portions between steps, so running streams go on."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import mlx.core as mx
import msgspec

from mlxpool.shared.control import DrainReport
from mlxpool.worker import load
from mlxpool.worker.cache.writer import Writer
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
    if cache.tier is not None:
        # Other processes delete too.
        await asyncio.to_thread(cache.tier.recheck)
    missing = await engine.call(cache.unwritten)
    while writer is not None and missing:
        before, unwritten = writer.spills, missing
        while await engine.call(partial(cache.offer_some, unwritten)):
            if not await _written(writer, timeout_s, began_s):
                break
        in_time = await _written(writer, timeout_s, began_s)
        # Rows that end meanwhile leave more.
        missing = await engine.call(cache.unwritten)
        if not in_time or writer.spills == before:
            break
    off = cache.lost_disk if writer is None else writer.off
    return DrainReport(
        durable=not missing,
        flushed=0 if writer is None else writer.spills - spilled,
        missing=len(missing),
        dropped=0 if writer is None else writer.dropped,
        failed=0 if writer is None else writer.failed,
        elapsed_ms=(time.monotonic() - began_s) * 1000,
        off=msgspec.UNSET if off is None else off,
    )


async def _written(writer: Writer, timeout_s: float, began_s: float) -> bool:
    """Wait for what the writer has; False when the time is over."""
    rest_s = timeout_s - (time.monotonic() - began_s)
    await asyncio.to_thread(writer.flush, max(0.0, rest_s))
    return time.monotonic() - began_s < timeout_s


async def set_ram_bytes(
    engine: Engine, ram_bytes: int, memory_limit_bytes: int, reserve_bytes: int = 0
) -> None:
    """Another share of memory: over once no more is held, what had to be written first included, or after
    SHRINK_S. memory_limit_bytes: of everything else. reserve_bytes: as of `load.set_memory_limits`."""
    cache = engine.cache
    if cache is None:
        return
    shrinks = ram_bytes < cache.ram.max_bytes

    def change() -> None:
        cache.set_max_bytes(ram_bytes)
        if not shrinks:
            load.set_memory_limits(memory_limit_bytes + ram_bytes, reserve_bytes)

    def give_back() -> None:
        # What is written is let go of by the writer's thread; MLX keeps its memory until told.
        mx.clear_cache()
        load.set_memory_limits(memory_limit_bytes + ram_bytes, reserve_bytes)

    await engine.call(change)
    if shrinks:
        if cache.writer is not None:
            await asyncio.to_thread(cache.writer.flush, SHRINK_S)
        await engine.call(give_back)
