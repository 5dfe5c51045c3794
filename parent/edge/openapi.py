"""`GET /openapi.json`: every route, what it takes and every status that it answers with.

The routes are a table (openapi_routes.py); the schemas of bodies are made from the tables of fields that
check them, those of answers from the structs that are sent, so neither can say something else. Made when it
is asked for first: a server that nobody asks imports none of it.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web

VERSION = "3.1.0"


class OpenApi:
    """The handler and the document it has made."""

    def __init__(self) -> None:
        self._made: bytes | None = None

    async def document(self, _: web.Request) -> web.Response:
        """GET /openapi.json"""
        if self._made is None:
            self._made = await asyncio.to_thread(lambda: msgspec.json.encode(document()))
        return web.Response(body=self._made, content_type="application/json")


def document() -> dict[str, Any]:
    """The whole document."""
    from .openapi_routes import OPERATIONS
    from .openapi_schemas import SECURITY_SCHEMES, operation, schemas

    paths: dict[str, dict[str, Any]] = {}
    for entry in OPERATIONS:
        paths.setdefault(entry.path, {})[entry.method] = operation(entry)
    return {
        "openapi": VERSION,
        "info": {
            "title": "mlxpool",
            "version": version("mlxpool"),
            "description": "Models of one machine, by the protocols of several vendors' clients.",
        },
        "paths": paths,
        "components": {"schemas": schemas(), "securitySchemes": SECURITY_SCHEMES},
        # A server without api_keys asks for none.
        "security": [{}, {"bearer": []}, {"key": []}],
    }
