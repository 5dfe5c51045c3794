"""`/api/library` and `/api/fit`: what is on this machine, whether it fits, and taking it off the disk."""

from __future__ import annotations

import asyncio
import shutil
from typing import Any

import msgspec
from aiohttp import web

from mlxpool.parent import removal, streaming
from mlxpool.parent.library import Library, LibraryModel
from mlxpool.parent.pool.service import PoolService
from mlxpool.shared.checkpoint import CheckpointError
from mlxpool.shared.control import Phase
from mlxpool.shared.errors import error
from mlxpool.shared.memory import MemoryPlan, Verdict
from mlxpool.shared.text import cut

from .models import find
from .reply import json_response

# A context of a thousand billion tokens is a typing error.
MAX_CONTEXT_DIGITS = 12


class LibraryEntry(msgspec.Struct, frozen=True):
    """One model of `GET /api/library`. plan, verdict and explanation are null where `fault` says why.

    size_bytes: on disk. removable: whether DELETE takes it (its memory aside).
    """

    name: str
    path: str
    source: str
    model_type: str
    size_bytes: int
    state: Phase
    plan: MemoryPlan | None
    verdict: Verdict | None
    explanation: str | None
    fault: str | None
    removable: bool


class LibraryView(msgspec.Struct, frozen=True):
    """Body of `GET /api/library`. shadowed: folders that can't be reached, by the name they would have."""

    models: list[LibraryEntry]
    shadowed: dict[str, list[str]]
    disk_free_bytes: int


class Removed(msgspec.Struct, frozen=True):
    """Answer of DELETE."""

    id: str
    path: str
    freed_bytes: int


class LibraryRoutes:
    """Handlers of the library's routes."""

    def __init__(self, pool: PoolService, library: Library) -> None:
        self._pool = pool
        self._library = library

    async def view(self, _: web.Request) -> web.Response:
        """GET /api/library"""
        await self._library.look()
        entries = []
        for model in self._library.models():
            entries.append(self._entry(model))
            await asyncio.sleep(0)  # a first look reads headers: others get their turn between two models
        shadowed = {name: [str(path) for path in paths] for name, paths in self._library.shadowed().items()}
        return json_response(LibraryView(entries, shadowed, self._free_bytes()))

    async def fit(self, request: web.Request) -> web.Response:
        """GET /api/fit?model=&context=: the plan of a model at a context, in the server's budget, and in
        `stream` its lines where experts are streamed."""
        unknown = set(request.query) - {"model", "context"}
        if unknown:
            raise error("invalid_request", f"{cut(min(unknown))!r} is unknown; use model and context")
        if "model" not in request.query:
            raise error("invalid_request", "model is missing; use ?model=NAME&context=TOKENS", param="model")
        model = self._library.resolve(request.query["model"])
        context = _context(request.query.get("context"))
        await self._library.look()
        try:
            fit = self._library.fit(model, self._pool.backend, self._pool.budget.models_bytes, context)
        except CheckpointError as problem:
            raise error(
                "invalid_request", f"{model.name} can't be loaded: {problem}", param="model"
            ) from None
        budget = self._pool.budget
        body: dict[str, Any] = {"model": model.name, "explanation": fit.plan.explanation}
        body |= {"budget_bytes": budget.total_bytes, "prompt_cache_bytes": budget.prompt_cache_bytes}
        body |= {"stream": None if fit.stream is None else streaming.view(fit.stream)}
        return json_response(body | msgspec.to_builtins(fit.plan))

    async def remove(self, request: web.Request) -> web.Response:
        """DELETE /api/library/{id}: from the disk."""
        model = find(self._library, request.match_info["id"])
        refused = removal.refusal(model)
        if refused is not None:
            raise error("invalid_request", refused, param="id")
        slot = self._pool.slot(model.name)
        if slot is not None and (slot.alive or slot.waiting):
            raise error(
                "invalid_request",
                f"{model.name} is {slot.phase}; unload it first: POST /api/models/{model.name}/unload",
                param="id",
            )
        size_bytes = removal.size_bytes(model.path)
        try:
            # On the loop: nothing can ask for the model between the look at its slot and its end.
            trash = removal.unlist(model, self._pool.settings.home)
            await asyncio.to_thread(removal.delete, trash)
        except OSError as problem:
            raise error("internal_error", f"{model.name} could not be removed: {problem}") from None
        return json_response(Removed(model.name, str(model.path), size_bytes))

    def _entry(self, model: LibraryModel) -> LibraryEntry:
        described = self._library.describe(model, self._pool.backend, self._pool.budget.models_bytes)
        slot, plan = self._pool.slot(model.name), described.plan
        is_broken = described.fault is not None and (slot is None or not slot.alive)
        return LibraryEntry(
            name=model.name,
            path=str(model.path),
            source=model.source,
            model_type=described.model_type,
            size_bytes=described.size_bytes,
            state="failed" if is_broken else slot.phase if slot is not None else "absent",
            plan=plan,
            verdict=plan.verdict if plan is not None else None,
            explanation=plan.explanation if plan is not None else None,
            fault=described.fault,
            removable=removal.refusal(model) is None,
        )

    def _free_bytes(self) -> int:
        """Room where pulls are put: in the home, or, before there is one, in the nearest folder above it."""
        home = self._pool.settings.home.absolute()
        return shutil.disk_usage(next(path for path in (home, *home.parents) if path.exists())).free


def add_library_routes(app: web.Application, pool: PoolService, library: Library) -> None:
    """The routes of the library."""
    routes = LibraryRoutes(pool, library)
    app.add_routes(
        [
            web.get("/api/library", routes.view),
            web.delete("/api/library/{id:.+}", routes.remove),
            web.get("/api/fit", routes.fit),
        ]
    )


def _context(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= MAX_CONTEXT_DIGITS and int(value) > 0):
        raise error(
            "invalid_request", f"context is {cut(value)!r}; use a whole number of tokens", param="context"
        )
    return int(value)
