"""Connections: what is no HTTP request is refused as the API refuses everything else.

aiohttp answers a request line it can't parse with plain text and logs a traceback. A client of this API gets
the JSON envelope, a request id and a closed connection; the log gets a line that nobody has to read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import hdrs, web

from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut

from .reply import REQUEST_ID, error_response, request_id

logger = logging.getLogger("mlxpool.edge")

# A client that keeps its connection need not open one for the next question of a conversation.
KEEP_ALIVE_S = 75.0
# Characters of aiohttp's explanation that a client is told.
MAX_REASON_CHARS = 120


class Connection(web.RequestHandler):
    """aiohttp's connection with our words for what goes wrong before there is a request."""

    __slots__ = ()

    def _resume_transport_reading(self) -> None:
        # aiohttp resumes after every piece of every body it reads, paused or not: a system call each time, a
        # tenth of what the relay adds to a request.
        transport = self.transport
        if transport is not None and not transport.is_reading():
            super()._resume_transport_reading()

    def log_exception(self, *args: Any, **kw: Any) -> None:
        # A handler has refused this body already; aiohttp meets the same fault again when it reads the rest.
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An error outside of any handler: mostly bytes that are no HTTP."""
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer was sent already")
        identity = request_id(None)
        if status >= 500:
            logger.error("request %s failed outside of its handler", identity, exc_info=exc)
            refusal = error("internal_error", f"the server failed; its log has request {identity}")
        else:
            logger.debug("request %s: %s: %s", identity, status, message)
            refusal = ApiError(status, "invalid_request", _refused(message or ""))
        response = error_response(request, refusal)
        response.headers["x-request-id"] = identity
        response.headers["Server"] = "mlxpool"
        response.force_close()
        return response


def _refused(message: str) -> str:
    """What the HTTP library found wrong, for a client that need not know which library it was."""
    reason = message.strip().partition("\n")[0].rstrip(":")
    for encoding in ("zstd", "brotli"):
        if f"backports.{encoding}" in reason or encoding in reason.lower():
            return f"bodies in {encoding} are not read; send gzip, deflate or none"
    if limit := re.match(r"Got more than (\d+) bytes", reason):
        return f"a line of the request or one of its headers has more than {limit[1]} bytes"
    return f"not a valid HTTP request: {reason[:MAX_REASON_CHARS] or 'malformed'}"


def _expecting(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
) -> Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]:
    """`handle`, with our words for an Expect header that aiohttp refuses before any middleware."""

    async def handled(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPExpectationFailed as err:
            request[REQUEST_ID] = request_id(request.headers.get("X-Request-Id"))
            expected = cut(repr(request.headers.get(hdrs.EXPECT, "")))
            said = f"the Expect header is {expected}; send 100-continue or none"
            return error_response(request, ApiError(err.status, "invalid_request", said))

    return handled


async def listen(runner: web.AppRunner, listener: socket.socket) -> asyncio.Server:
    """Serve the runner's application on a bound socket; the runner's cleanup ends the connections."""
    server = runner.server
    assert server is not None
    server.request_handler = _expecting(server.request_handler)
    loop = asyncio.get_running_loop()
    settings: dict[str, Any] = {
        "access_log": None,
        "logger": logger,
        "keepalive_timeout": KEEP_ALIVE_S,
    }
    return await loop.create_server(lambda: Connection(server, loop=loop, **settings), sock=listener)
