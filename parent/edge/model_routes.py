"""One model's own pages: what its worker counts, and what it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
from aiohttp import web

from mlxpool.parent.library import Library
from mlxpool.parent.pool.service import PoolService
from mlxpool.parent.pool.upstream import UpstreamError
from mlxpool.shared.colibri.stats import LayerHeat
from mlxpool.shared.control import WorkerStats
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .events import LogLines
from .models import find_shown
from .reply import json_response

DEFAULT_LOG_LINES = 200
MAX_LOG_LINES = 5000

_T = TypeVar("_T")


class ExpertsView(msgspec.Struct, frozen=True):
    """Body of `GET /api/models/{id}/experts`."""

    model: str
    layers: list[LayerHeat]


class ModelRoutes:
    """Handlers below /api/models/{id}."""

    def __init__(self, pool: PoolService, library: Library) -> None:
        self._pool = pool
        self._library = library

    async def stats(self, request: web.Request) -> web.Response:
        """GET /api/models/{id}/stats; of a model that isn't loaded, its state alone."""
        model = find_shown(self._pool, self._library, request.match_info["id"])
        told = await _asked(model.name, self._pool.worker_stats(model.name))
        slot = self._pool.slot(model.name)
        state = slot.phase if slot is not None else "absent"
        return json_response({"model": model.name, "state": state, **(_shaped(told) if told else {})})

    async def experts(self, request: web.Request) -> web.Response:
        """GET /api/models/{id}/experts: how often each streamed expert is asked for, and which are held."""
        name = find_shown(self._pool, self._library, request.match_info["id"]).name
        told = await _asked(name, self._pool.heat_map(name))
        if told is None:
            loaded = self._pool.upstream(name) is not None
            raise error(
                "not_found",
                f"model {name!r} is held in memory as a whole: none of its experts are streamed"
                if loaded
                else f"model {name!r} is not loaded, so nothing is held of its experts; load it first: "
                f"POST /api/models/{name}/load",
                param="id",
            )
        return json_response(ExpertsView(name, told.layers))

    async def logs(self, request: web.Request) -> web.Response:
        """GET /api/models/{id}/logs?n=200: the last lines of the model's log."""
        model = find_shown(self._pool, self._library, request.match_info["id"])
        asked = request.query.get("n", str(DEFAULT_LOG_LINES))
        if not asked.isdecimal() or not 0 < int(asked) <= MAX_LOG_LINES:
            raise error(
                "invalid_request", f"n is {cut(asked)!r}; use a number from 1 to {MAX_LOG_LINES}", param="n"
            )
        lines = await asyncio.to_thread(self._pool.last_log_lines, model.name, int(asked))
        return json_response(LogLines(model.name, lines))


async def _asked(name: str, answer: Awaitable[_T]) -> _T:
    """What a worker answers. Raises ApiError 502 where it does not."""
    try:
        return await answer
    except (UpstreamError, TimeoutError, msgspec.MsgspecError) as err:
        raise error(
            "worker_crashed", f"the worker of model {name!r} does not answer ({type(err).__name__})"
        ) from None


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
        "colibri": told.colibri,
        "prefill_chunk": told.prefill_chunk,
        "open_grammars": told.open_grammars,
        "backend": told.backend,
        "dtype": told.dtype,
    }
