"""`/v1/models`: every model here, with its state and what it can do."""

from __future__ import annotations

import asyncio
import time

import msgspec
from aiohttp import web

from mlxpool.parent.library import Library, LibraryModel
from mlxpool.parent.pool.service import PoolService
from mlxpool.shared.control import Phase
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .reply import json_response


class Capabilities(msgspec.Struct, frozen=True):
    """What is claimed is what was built."""

    chat: bool = True
    streaming: bool = True
    tools: bool = True
    structured_output: bool = True
    log_probs: bool = True
    batch: bool = True


class ModelView(msgspec.Struct, frozen=True, omit_defaults=False):
    """One entry of `/v1/models`. created: unix seconds of the folder's last change."""

    id: str
    created: int
    state: Phase
    context_window: int | None
    max_output_tokens: int | None
    planned_bytes: int | None
    capabilities: Capabilities
    pinned: bool
    reason: str | None
    object: str = "model"
    owned_by: str = "mlxpool"


class ModelListing:
    """Handlers of the listing."""

    def __init__(self, pool: PoolService, library: Library) -> None:
        self._pool = pool
        self._library = library

    async def list_models(self, _: web.Request) -> web.Response:
        """GET /v1/models"""
        entries = []
        for model in self._library.models():
            entries.append(view_model(self._pool, self._library, model))
            await asyncio.sleep(0)  # a first look reads headers: others get their turn between two models
        return json_response({"object": "list", "data": entries})

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}; an alias answers as the model it leads to."""
        model = self._library.resolve(request.match_info["id"])
        return json_response(view_model(self._pool, self._library, model))


def view_model(pool: PoolService, library: Library, model: LibraryModel) -> ModelView:
    """The entry of one model."""
    described = library.describe(model, pool.backend, pool.budget.models_bytes)
    slot = pool.slot(model.name)
    plan = described.plan
    failed = described.fault is not None and (slot is None or not slot.alive)
    try:
        created = int(model.path.stat().st_mtime)
    except OSError:
        created = int(time.time())
    return ModelView(
        id=model.name,
        created=created,
        state="failed" if failed else slot.phase if slot is not None else "absent",
        context_window=plan.context if plan is not None else None,
        max_output_tokens=plan.context - 1 if plan is not None else None,
        planned_bytes=plan.planned_bytes if plan is not None else None,
        capabilities=Capabilities(),
        pinned=slot.pinned if slot is not None else model.settings.pin,
        reason=described.fault if failed else slot.reason if slot is not None else None,
    )


def find(library: Library, name: str) -> LibraryModel:
    """The model of exactly that name. Raises ApiError 404."""
    model = library.find(name)
    if model is None:
        # `resolve` words the refusal and names the nearest; an alias is no model that could be pinned.
        resolved = library.resolve(name)
        raise error(
            "model_not_found",
            f"{cut(name)!r} is an alias; use the model's own name, {resolved.name!r}",
            param="id",
        )
    return model
