"""Bringing to disk all that memory holds, for a flush or a drain. Event loop; the engine's thread hands the
writer its portions between steps, so running streams go on."""

from __future__ import annotations

import asyncio
import time

from mlxpool.shared.control import DrainReport
from mlxpool.worker.engine.engine import Engine


async def flush(engine: Engine, timeout_s: float) -> DrainReport:
    """Write what is not on disk, for at most that long."""
    cache = engine.cache
    if cache is None:
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


async def set_ram_bytes(engine: Engine, ram_bytes: int) -> None:
    """Another share of memory: over once no more is held."""
    cache = engine.cache
    if cache is not None:
        await engine.call(lambda: cache.set_max_bytes(ram_bytes))
