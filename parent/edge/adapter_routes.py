"""`/v1/adapters`: what a model's worker has mounted, what there is, mounting and unmounting.

Mounting is a request like any other: it takes a ticket, and a model that isn't loaded is loaded for it.
Looking and unmounting load nothing. A path is followed to its end here, and only where models and adapters
lie.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from mlxpool.parent.adapters import Available, Shelf
from mlxpool.parent.library import Library, LibraryModel
from mlxpool.parent.pool.service import PoolService
from mlxpool.parent.pool.upstream import UpstreamError
from mlxpool.shared import adapters
from mlxpool.shared.adapters import AdapterError
from mlxpool.shared.api import read
from mlxpool.shared.api.read import invalid, quoted
from mlxpool.shared.control import AdapterList, MountAdapter, MountedAdapter
from mlxpool.shared.errors import error

from .exchange import Exchange, refusal
from .reply import REQUEST_ID, json_response
from .responses_sinks import Captured

# The worker's event loop answers these from what it holds.
ANSWER_TIMEOUT_S = 10.0

_FIELDS = ("id", "path", "model")
_CONTROL = "/control/adapters"


class MountBody(msgspec.Struct, frozen=True):
    """The body of `POST /v1/adapters`. path: of its folder, absolute; without it the one of that id in the
    home. model: without it the default one."""

    id: str
    path: str | None = None
    model: str | None = None


class MountedView(MountedAdapter, frozen=True, kw_only=True):
    """An adapter that is mounted, and on which model."""

    model: str
    object: str = "adapter"


class MountedPage(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/adapters`."""

    data: list[MountedView]
    object: str = "list"


class AvailablePage(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/adapters/available`."""

    model: str
    data: list[Available]
    object: str = "list"


class Unmounted(msgspec.Struct, frozen=True):
    """The answer of `DELETE /v1/adapters/{id}`."""

    id: str
    object: str = "adapter"
    deleted: bool = True


class AdapterRoutes:
    """The handlers."""

    def __init__(self, pool: PoolService, library: Library, shelf: Shelf) -> None:
        self._pool = pool
        self._library = library
        self._shelf = shelf

    async def mounted(self, request: web.Request) -> web.Response:
        """GET /v1/adapters?model="""
        model = self._asked_model(request)
        status, body = await self._ask(model, "GET", _CONTROL) or (200, b"")
        if status != 200:
            raise refusal(status, body)
        held = msgspec.json.decode(body, type=AdapterList).data if body else []
        views = [MountedView(**msgspec.structs.asdict(one), model=model.name) for one in held]
        return json_response(MountedPage(views))

    async def available(self, request: web.Request) -> web.Response:
        """GET /v1/adapters/available?model="""
        model = self._asked_model(request)
        streamed = model.settings.experts == "stream"
        found = await asyncio.to_thread(self._shelf.available, model.path, streamed=streamed)
        return json_response(AvailablePage(model.name, found))

    async def mount(self, request: web.Request) -> web.Response:
        """POST /v1/adapters"""
        asked = _read_body(read.json_object(await request.read()))
        named = _query_model(request) if asked.model is None else asked.model
        model, also = (found := self._library.resolved(named)).model, found.adapter
        if also not in (None, asked.id):
            raise invalid(
                "model",
                f"model {quoted(named)} asks for {quoted(also)}; name model {quoted(model.name)} alone",
            )
        path = None if asked.path is None else await asyncio.to_thread(self._followed, asked.path)
        body = msgspec.json.encode(MountAdapter(asked.id, path))
        grant = self._pool.request(model)
        sink = Captured()
        try:
            exchange = Exchange(body, _CONTROL, False, grant, model.name, request[REQUEST_ID], sink, None)
            exchange.on_unreachable = partial(self._pool.unreachable, grant)
            await exchange.run()
        finally:
            self._pool.done(grant)
        if sink.status != 200:
            return web.Response(status=sink.status, body=sink.body, headers=dict(sink.headers))
        made = msgspec.json.decode(sink.body, type=MountedAdapter)
        return json_response(MountedView(**msgspec.structs.asdict(made), model=model.name))

    async def unmount(self, request: web.Request) -> web.Response:
        """DELETE /v1/adapters/{id}?model="""
        model, adapter_id = self._asked_model(request), request.match_info["id"]
        answer = await self._ask(model, "DELETE", f"{_CONTROL}/{quote(adapter_id, safe='')}")
        if answer is None:
            raise error(
                "not_found", f"model {model.name!r} is not loaded, so nothing is mounted on it", param="id"
            )
        status, body = answer
        if status != 200:
            raise refusal(status, body)
        return json_response(Unmounted(adapter_id))

    def _asked_model(self, request: web.Request) -> LibraryModel:
        return self._library.resolve(_query_model(request))

    async def _ask(self, model: LibraryModel, method: str, target: str) -> tuple[int, bytes] | None:
        """What the model's worker answers; None where none serves."""
        upstream = self._pool.upstream(model.name)
        if upstream is None:
            return None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S), await upstream.request(method, target) as answer:
                return answer.status, await answer.read()
        except (UpstreamError, TimeoutError) as err:
            raise error(
                "worker_crashed", f"the worker of model {model.name!r} does not answer ({type(err).__name__})"
            ) from None

    def _followed(self, path: str) -> str:
        """Where a path leads: below the home's adapters, or a folder that models are found in. Reads the
        disk."""
        if not Path(path).is_absolute():
            raise invalid("path", f"path {quoted(path)} must be absolute")
        roots = [self._shelf.root, *self._library.folders()]
        try:
            return str(adapters.inside(Path(path), roots))
        except AdapterError as problem:
            raise invalid("path", f"path: {problem}") from None


def _query_model(request: web.Request) -> str | None:
    for name in request.query:
        if name != "model":
            raise read.unknown_field(name, ("model",))
    if len(request.query.getall("model", [])) > 1:
        raise invalid("model", "model stands in the query more than once; send it once")
    return request.query.get("model")


def _read_body(fields: dict[str, Any]) -> MountBody:
    for name in fields:
        if name not in _FIELDS:
            raise read.unknown_field(name, _FIELDS)
    for name in ("path", "model"):
        value = fields.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise invalid(name, f"{name} must be a non-empty string, not {quoted(value)}")
    adapter_id = fields.get("id")
    if not isinstance(adapter_id, str) or not adapters.is_id(adapter_id):
        what = "is missing; it must be" if adapter_id is None else f"is {quoted(adapter_id)}; use"
        raise invalid("id", f"id {what} a name of {adapters.ID_RULE}")
    return MountBody(adapter_id, fields.get("path"), fields.get("model"))


def add_adapter_routes(app: web.Application, pool: PoolService, library: Library, shelf: Shelf) -> None:
    """The routes of adapters."""
    routes = AdapterRoutes(pool, library, shelf)
    app.add_routes(
        [
            web.get("/v1/adapters", routes.mounted),
            web.get("/v1/adapters/available", routes.available),
            web.post("/v1/adapters", routes.mount),
            web.delete("/v1/adapters/{id}", routes.unmount),
        ]
    )
