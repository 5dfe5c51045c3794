"""`POST /api/config/reload`: read the settings again, say what changed."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from mlxpool.shared.config import ConfigError
from mlxpool.shared.errors import error

from .reply import json_response


class ConfigRoutes:
    """The handler. reload: see `Reloader.reload`."""

    def __init__(self, reload: Callable[[], object]) -> None:
        self._reload = reload

    async def reload(self, request: web.Request) -> web.Response:
        """POST /api/config/reload"""
        if (await request.read()).strip() not in (b"", b"{}"):
            raise error("invalid_request", "this command takes no body; send none, or {}")
        try:
            difference = self._reload()
        except ConfigError as err:
            raise error("invalid_request", f"nothing was changed: {err}") from None
        return json_response(difference)
