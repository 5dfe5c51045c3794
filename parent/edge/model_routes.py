"""One model's own pages: what its worker counts, and what it wrote."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from mlxpool.parent.library import Library
from mlxpool.parent.pool.service import PoolService
from mlxpool.parent.pool.upstream import UpstreamError
from mlxpool.shared.control import WorkerStats
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .events import LogLines
from .models import find
from .reply import json_response

DEFAULT_LOG_LINES = 200
MAX_LOG_LINES = 5000


class ModelRoutes:
    """Handlers below /api/models/{id}."""

    def __init__(self, pool: PoolService, library: Library) -> None:
        self._pool = pool
        self._library = library

    async def stats(self, request: web.Request) -> web.Response:
        """GET /api/models/{id}/stats; of a model that isn't loaded, its state alone."""
        model = find(self._library, request.match_info["id"])
        try:
            told = await self._pool.worker_stats(model.name)
        except (UpstreamError, TimeoutError, msgspec.MsgspecError) as err:
            raise error(
                "worker_crashed", f"the worker of model {model.name!r} does not answer ({type(err).__name__})"
            ) from None
        slot = self._pool.slot(model.name)
        state = slot.phase if slot is not None else "absent"
        return json_response({"model": model.name, "state": state, **(_shaped(told) if told else {})})

    async def logs(self, request: web.Request) -> web.Response:
        """GET /api/models/{id}/logs?n=200: the last lines of the model's log."""
        model = find(self._library, request.match_info["id"])
        asked = request.query.get("n", str(DEFAULT_LOG_LINES))
        if not asked.isdecimal() or not 0 < int(asked) <= MAX_LOG_LINES:
            raise error(
                "invalid_request", f"n is {cut(asked)!r}; use a number from 1 to {MAX_LOG_LINES}", param="n"
            )
        lines = await asyncio.to_thread(self._pool.last_log_lines, model.name, int(asked))
        return json_response(LogLines(model.name, lines))


def _shaped(told: WorkerStats) -> dict[str, object]:
    """A worker's counters by what they are about."""
    return {
        "requests": told.requests,
        "cancelled": told.cancelled,
        "errors": told.errors,
        "tokens": told.tokens,
        "prompt_tokens": told.prompt_tokens,
        "tokens_per_s": told.tokens_per_s,
        "batch": {"configured": told.batch, "rows": told.rows, "waiting": told.waiting},
        "admission": {
            "enforced_context": told.context,
            "kv_pool_bytes": told.kv_pool_bytes,
            "kv_used_bytes": told.kv_used_bytes,
            "weights_bytes": told.weights_bytes,
        },
        "memory": {
            "active_bytes": told.active_bytes,
            "peak_bytes": told.peak_bytes,
            "cache_bytes": told.cache_bytes,
        },
        "prompt_cache": told.prompt_cache,
        "ssd_cache": told.ssd_cache,
        "kv": told.kv,
        "prefill_chunk": told.prefill_chunk,
        "open_grammars": told.open_grammars,
        "backend": told.backend,
        "dtype": told.dtype,
    }
