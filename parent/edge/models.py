"""`/v1/models`: every model here, with its state and what it can do.

An entry has the fields of OpenAI's listing and of Anthropic's beside ours. Only of `capabilities` both have
their own idea: clients that say that they are Anthropic's get an object of support for each, ours among them.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from mlxpool.parent.adapters import Shelf
from mlxpool.parent.library import Library, LibraryModel
from mlxpool.parent.pool.service import PoolService
from mlxpool.shared.control import Phase
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .capabilities import Capabilities, anthropic_capabilities, capabilities
from .reply import client_protocol, json_response


class ModelView(msgspec.Struct, frozen=True, omit_defaults=False):
    """One entry of `/v1/models`. created, created_at: the folder's last change, in unix seconds and as RFC
    3339. max_input_tokens, max_tokens: the context window and the longest answer by Anthropic's names.
    adapter: of an entry `model:adapter`, which is its model in everything else."""

    id: str
    created: int
    state: Phase
    context_window: int | None
    max_output_tokens: int | None
    planned_bytes: int | None
    capabilities: Capabilities
    pinned: bool
    reason: str | None
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    object: str = "model"
    type: str = "model"
    owned_by: str = "mlxpool"
    lifecycle: str = "active"
    adapter: str | None = None


class ModelPage(msgspec.Struct, frozen=True):
    """The whole listing: there is never more than one page. first_id, last_id: null for no model."""

    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"


class ModelListing:
    """Handlers of the listing."""

    def __init__(self, pool: PoolService, library: Library, shelf: Shelf) -> None:
        self._pool = pool
        self._library = library
        self._shelf = shelf

    async def list_models(self, request: web.Request) -> web.Response:
        """GET /v1/models: each model, and behind it one entry for each adapter in the home that fits it."""
        views, told = [], []
        await self._library.look()
        models = self._library.models()
        resident = [model.path for model in models if model.settings.experts != "stream"]
        fitting = await asyncio.to_thread(self._shelf.fitting, resident)
        for model in models:
            own = view_model(self._pool, self._library, model)
            fit = fitting[model.path] if model.settings.experts != "stream" else []
            for view in (own, *(_adapted(own, adapter_id) for adapter_id in fit)):
                views.append(view)
                told.append(_for(request, model, view))
            await asyncio.sleep(0)  # a first look reads headers: others get their turn between two models
        first, last = (views[0].id, views[-1].id) if views else (None, None)
        return json_response(ModelPage(told, first, last))

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{id}; an alias answers as the model it leads to."""
        resolved = self._library.resolved(request.match_info["id"])
        view = view_model(self._pool, self._library, resolved.model)
        if resolved.adapter is not None:
            view = _adapted(view, resolved.adapter)
        return json_response(_for(request, resolved.model, view))


def _adapted(view: ModelView, adapter: str) -> ModelView:
    """The entry of a model with these adapters."""
    name = f"{view.id}:{adapter}"
    return msgspec.structs.replace(view, id=name, display_name=name, adapter=adapter)


def _for(request: web.Request, model: LibraryModel, view: ModelView) -> Any:
    """The entry as this client reads it."""
    if client_protocol(request) != "anthropic":
        return view
    return {**msgspec.structs.asdict(view), "capabilities": anthropic_capabilities(model, view.capabilities)}


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
    window = plan.context if plan is not None else None
    longest = plan.context - 1 if plan is not None else None
    return ModelView(
        id=model.name,
        display_name=model.name,
        created=created,
        created_at=datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=window,
        max_tokens=longest,
        state="failed" if failed else slot.phase if slot is not None else "absent",
        context_window=window,
        max_output_tokens=longest,
        planned_bytes=plan.planned_bytes if plan is not None else None,
        capabilities=capabilities(model, described.stream),
        pinned=slot.pinned if slot is not None else model.settings.pin,
        reason=described.fault if failed else slot.reason if slot is not None else None,
    )


def find_shown(pool: PoolService, library: Library, name: str) -> LibraryModel:
    """Like `find`, and also a model whose folder is gone and whose worker isn't: it can still be looked at,
    and sent away. Raises ApiError 404."""
    lost = pool.shown(name) if library.find(name) is None else None
    return lost or find(library, name)


def find(library: Library, name: str) -> LibraryModel:
    """The model of exactly that name. Raises ApiError 404."""
    model = library.find(name)
    if model is None:
        # `resolved` words the refusal and names the nearest; an alias is no model that could be pinned.
        resolved = library.resolved(name)
        what = "an alias" if resolved.adapter is None else "a model with an adapter"
        raise error(
            "model_not_found",
            f"{cut(name)!r} is {what}; use the model's own name, {resolved.model.name!r}",
            param="id",
        )
    return model
