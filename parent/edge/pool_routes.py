"""`/api/pool` and the commands: load, unload, pin, unpin. Each answers at once with the model's state."""

from __future__ import annotations

import msgspec
from aiohttp import web

from mlxpool.parent.library import Library, LibraryModel
from mlxpool.parent.pool.service import PoolService
from mlxpool.shared.control import Phase
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .models import find, find_shown
from .reply import json_response


class UnloadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `unload`. force: end running answers now, with an error."""

    force: bool = False


class ModelState(msgspec.Struct, frozen=True):
    """Answer of every command."""

    id: str
    state: Phase
    pinned: bool
    reason: str | None


class PoolRoutes:
    """Handlers of the pool's own routes."""

    def __init__(self, pool: PoolService, library: Library) -> None:
        self._pool = pool
        self._library = library

    async def view(self, _: web.Request) -> web.Response:
        """GET /api/pool"""
        return json_response(self._pool.view())

    async def load(self, request: web.Request) -> web.Response:
        """POST /api/models/{id}/load"""
        model = await self._model(request)
        self._pool.load(model)
        return self._state(model)

    async def unload(self, request: web.Request) -> web.Response:
        """POST /api/models/{id}/unload"""
        model = find_shown(self._pool, self._library, request.match_info["id"])
        body = await request.read()
        try:
            wish = msgspec.json.decode(body, type=UnloadBody) if body.strip() else UnloadBody()
        except (msgspec.MsgspecError, UnicodeDecodeError) as err:
            raise error("invalid_request", f'{cut(str(err))}; use {{}} or {{"force": true}}') from None
        self._pool.unload(model, force=wish.force)
        return self._state(model)

    async def pin(self, request: web.Request) -> web.Response:
        """POST /api/models/{id}/pin"""
        model = await self._model(request)
        self._pool.pin(model, True)
        return self._state(model)

    async def unpin(self, request: web.Request) -> web.Response:
        """POST /api/models/{id}/unpin"""
        await _no_body(request)
        model = find_shown(self._pool, self._library, request.match_info["id"])
        self._pool.pin(model, False)
        return self._state(model)

    async def _model(self, request: web.Request) -> LibraryModel:
        """The model of a command that takes no body, or an empty object."""
        await _no_body(request)
        return find(self._library, request.match_info["id"])

    def _state(self, model: LibraryModel) -> web.Response:
        slot = self._pool.slot(model.name)
        if slot is None:
            return json_response(ModelState(model.name, "absent", model.settings.pin, None), 202)
        return json_response(ModelState(model.name, slot.phase, slot.pinned, self._pool.reason(slot)), 202)


async def _no_body(request: web.Request) -> None:
    """Raises ApiError 400 for any but an empty object."""
    if (await request.read()).strip() not in (b"", b"{}"):
        raise error("invalid_request", "this command takes no body; send none, or {}")
