"""`/api/cache`: what is kept of prompts, in memory and on disk, and having all of it written."""

from __future__ import annotations

import asyncio
import math

import msgspec
from aiohttp import web

from mlxpool.parent.pool.prompt_caches import NO_ANSWER
from mlxpool.parent.pool.service import PoolService
from mlxpool.shared.control import Phase, PromptCacheStats, SsdCacheStats, WorkerStats
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .reply import json_response

# Whoever waits longer than this for a flush has left.
MAX_FLUSH_S = 3600.0


class RamView(msgspec.Struct, frozen=True):
    """In memory, of all workers. max_bytes: what they may have together."""

    bytes: int
    max_bytes: int


class SsdView(msgspec.Struct, frozen=True):
    """On disk, of all models, those without a worker too. off: why nothing is written just now."""

    enabled: bool
    dir: str
    bytes: int
    max_bytes: int
    entries: int
    off: str | None


class ModelCache(msgspec.Struct, frozen=True):
    """One worker's tiers, as it says."""

    model: str
    state: Phase
    prompt_cache: PromptCacheStats
    ssd_cache: SsdCacheStats | None


class FolderView(msgspec.Struct, frozen=True):
    """One model's records on disk. model: "" where its folder does not say. last_used: unix seconds."""

    fingerprint: str
    model: str
    entries: int
    bytes: int
    last_used: float | None


class CacheView(msgspec.Struct, frozen=True):
    """The body of `GET /api/cache`."""

    ram: RamView
    ssd: SsdView
    models: list[ModelCache]
    folders: list[FolderView]


class CacheRoutes:
    """The handlers."""

    def __init__(self, pool: PoolService) -> None:
        self._pool = pool

    async def view(self, request: web.Request) -> web.Response:
        """GET /api/cache: asks every worker, and reads the names of the files."""
        _only(request, set())
        names = list(self._pool.workers())
        disk = self._pool.disk
        told, _ = await asyncio.gather(asyncio.gather(*(self._stats(name) for name in names)), disk.look())
        models = [
            ModelCache(name, self._state(name), stats.prompt_cache, stats.ssd_cache)
            for name, stats in zip(names, told, strict=True)
            if stats is not None
        ]
        cache = self._pool.settings.cache
        offs = [model.ssd_cache.off for model in models if model.ssd_cache is not None]
        ssd = SsdView(
            enabled=cache.is_on_disk,
            dir=str(self._pool.settings.kv_folder),
            bytes=disk.bytes,
            max_bytes=cache.ssd_budget,
            entries=disk.entries,
            off=next((off for off in offs if off is not None), None),
        )
        ram = RamView(sum(m.prompt_cache.bytes for m in models), self._pool.budget.prompt_cache_bytes)
        folders = [
            FolderView(use.fingerprint, use.model, use.entries, use.bytes, use.last_used_s)
            for use in disk.folders
        ]
        return json_response(CacheView(ram, ssd, models, folders))

    async def flush(self, request: web.Request) -> web.Response:
        """POST /api/cache/flush?timeout_s=: 200 when everything is on disk, else 503, with the same body."""
        _only(request, {"timeout_s"})
        if (await request.read()).strip() not in (b"", b"{}"):
            raise error("invalid_request", "this command takes no body; send none, or {}")
        timeout_s = _seconds(request.query.get("timeout_s"), self._pool.settings.pool.drain_timeout)
        report = await self._pool.flush(timeout_s)
        return json_response(report, 200 if report.durable else 503)

    async def _stats(self, name: str) -> WorkerStats | None:
        """None where the worker does not answer: it is dying, and its pool entry says so."""
        try:
            return await self._pool.worker_stats(name)
        except NO_ANSWER:
            return None

    def _state(self, name: str) -> Phase:
        slot = self._pool.slot(name)
        return slot.phase if slot is not None else "absent"


def _only(request: web.Request, known: set[str]) -> None:
    unknown = set(request.query) - known
    if unknown:
        use = f"use {', '.join(sorted(known))}" if known else "this takes none"
        raise error("invalid_request", f"{cut(min(unknown))!r} is unknown; {use}")


def _seconds(value: str | None, default: float) -> float:
    if value is None:
        return min(default, MAX_FLUSH_S)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_FLUSH_S:
        raise error(
            "invalid_request",
            f"timeout_s is {cut(value)!r}; use seconds from 0 to {MAX_FLUSH_S:g}",
            param="timeout_s",
        )
    return seconds


def add_cache_routes(app: web.Application, pool: PoolService) -> None:
    """The routes of the prompt cache."""
    routes = CacheRoutes(pool)
    app.add_routes([web.get("/api/cache", routes.view), web.post("/api/cache/flush", routes.flush)])
