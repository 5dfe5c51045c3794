"""`GET /experts`: which experts of a model are asked for, and which are in memory."""

from __future__ import annotations

import msgspec
from aiohttp import web

from mlxpool.shared.errors import error
from mlxpool.worker.engine.terms import Stream


def add_expert_routes(app: web.Application, model: str, stream: Stream | None) -> None:
    """The route of one model's experts. stream: None where none are streamed: then there is no map."""

    async def heat(_request: web.Request) -> web.Response:
        if stream is None:
            raise error("not_found", f"{model} is held in memory as a whole: it streams no experts")
        return web.Response(body=msgspec.json.encode(stream.heat()), content_type="application/json")

    app.router.add_get("/experts", heat)
