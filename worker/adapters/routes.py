"""`/control/adapters`: what is mounted, mounting, unmounting. For the parent, which has checked the path."""

from __future__ import annotations

from pathlib import Path

import msgspec
from aiohttp import web

from mlxpool.shared.control import AdapterList, MountAdapter
from mlxpool.shared.errors import error
from mlxpool.worker.adapters.mounted import Adapters


def add_adapter_routes(app: web.Application, adapters: Adapters) -> None:
    """The routes of one model's adapters."""

    async def listed(_request: web.Request) -> web.Response:
        return _json(AdapterList(adapters.listed()))

    async def mount(request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=MountAdapter)
        except (msgspec.MsgspecError, UnicodeDecodeError) as err:
            raise error("invalid_request", f"the body names no adapter: {err}") from None
        folder = None if asked.path is None else Path(asked.path)
        return _json(await adapters.mount(asked.id, folder))

    async def unmount(request: web.Request) -> web.Response:
        adapters.unmount(request.match_info["id"])
        return _json({"id": request.match_info["id"], "object": "adapter", "deleted": True})

    app.router.add_get("/control/adapters", listed)
    app.router.add_post("/control/adapters", mount)
    app.router.add_delete("/control/adapters/{id}", unmount)


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")
