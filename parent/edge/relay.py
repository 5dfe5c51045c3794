"""The relay: a client's request to the worker of its model, and the answer back, byte for byte.

It reads three fields of the body, takes a ticket and holds it while an exchange forwards the raw bytes and
streams what comes back: until the body's end, an error, or the moment the client leaves, when the server
cancels the handler. What an inference route is besides its path is its preamble.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from aiohttp import web

from mlxpool.parent.library import Library
from mlxpool.parent.pool.service import PoolService
from mlxpool.shared.control import HEADER_ADAPTER

from .exchange import Exchange
from .head import Head, read_head
from .metrics import RelayMetrics
from .preamble import ChatPreamble, CompletionPreamble, MessagesPreamble, Preamble
from .reply import REQUEST_ID
from .sink import Sink, WebSink
from .trace import RequestTimes, Trace

# Larger bodies are read for their fields off the event loop's turn.
LARGE_BODY_BYTES = 2**20

# What speaks for a stream of the model that was asked for by this name.
MakePreamble = Callable[[str], Preamble]


class Relay:
    """Handlers of the inference routes, and the way of everything else to a worker."""

    def __init__(self, pool: PoolService, library: Library, metrics: RelayMetrics, trace: Trace) -> None:
        self._pool = pool
        self._library = library
        self._metrics = metrics
        self._trace = trace

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._answer(request, ChatPreamble)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        return await self._answer(request, CompletionPreamble)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages"""
        return await self._answer(request, lambda _: MessagesPreamble(request[REQUEST_ID]))

    async def carry(
        self,
        body: bytes,
        head: Head,
        path: str,
        request_id: str,
        sink: Sink,
        make_preamble: MakePreamble,
        headers: Mapping[str, str] = {},
        begun: float | None = None,
    ) -> RequestTimes:
        """Brings a request to its model's worker and the answer to `sink`, under a ticket of the pool's.

        head: `read_head`'s, of this body. headers: further ones for the worker. begun: monotonic, when the
        request came. Errors of the exchange go to the sink. Raises ApiError 404 for an unknown model, before
        anything was sent; ConnectionError when the client is gone.
        """
        times = RequestTimes()
        times.begun = time.monotonic() if begun is None else begun
        resolved = self._library.resolved(head.model)
        model = resolved.model
        if resolved.adapter is not None:
            headers = {**headers, HEADER_ADAPTER: quote(resolved.adapter)}
        asked = head.model or model.name
        times.parsed = time.monotonic()
        preamble = make_preamble(asked) if head.stream else None
        grant = self._pool.request(model, head.keep_alive_s)
        exchange = Exchange(body, path, head.stream, grant, asked, request_id, sink, preamble, headers)
        exchange.on_first_token = partial(self._pool.first_token, grant)
        exchange.on_unreachable = partial(self._pool.unreachable, grant)
        exchange.times = times
        try:
            await exchange.run()
        finally:
            self._pool.done(grant)
            times.ended = time.monotonic()
            self._metrics.observe(model.name, times.outcome, *times.durations())
            self._trace.write(request_id, model.name, times)
        return times

    async def _answer(self, request: web.Request, make_preamble: MakePreamble) -> web.StreamResponse:
        begun = time.monotonic()
        body = await request.read()
        head = await head_of(body)
        sink = WebSink(request)
        await self.carry(body, head, request.path, request[REQUEST_ID], sink, make_preamble, begun=begun)
        return sink.response


async def head_of(body: bytes) -> Head:
    """`read_head` without holding up others. Raises ApiError 400."""
    head: Head = await maybe_apart(len(body), read_head, body)
    return head


async def maybe_apart(bytes_to_read: int, work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, off the loop where there is so much to read that it would hold up others."""
    return await asyncio.to_thread(work, *args) if bytes_to_read > LARGE_BODY_BYTES else work(*args)
