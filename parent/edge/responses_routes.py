"""`/v1/responses` over HTTP: create, get, follow, list its input, cancel, delete, compact.

What a response is, and how it comes to be, is behind these handlers: they read queries and shape answers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from functools import partial

import msgspec
from aiohttp import web

from mlxpool.parent.faults import Unavailable
from mlxpool.parent.history import compact, input_items, streams
from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.history.records import Record
from mlxpool.parent.history.resolve import Ask, shifted
from mlxpool.parent.history.store import HistoryStore
from mlxpool.parent.library import Library
from mlxpool.shared.api import read
from mlxpool.shared.api.read import invalid, quoted
from mlxpool.shared.api.response_events import replay
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .head import Head
from .relay import Relay, head_of
from .reply import REQUEST_ID, json_response
from .responses_answers import Answers, Prepared, check, preamble_of, read_ask
from .responses_background import Background
from .responses_lookup import unavailable
from .responses_sinks import Captured
from .responses_socket import ResponsesSocket
from .sink import EVENT_STREAM, WebSink

_INCLUDE = frozenset({"include", "include[]"})
_ORDERS: dict[str, input_items.Order] = {"asc": "asc", "desc": "desc"}
# A number that no event reaches.
_MAX_NUMBER = 2**53


def add_response_routes(
    app: web.Application, relay: Relay, library: Library, store: HistoryStore, max_body_bytes: int
) -> None:
    """Every route of a response, and its part of the way down."""
    answers = Answers(relay, library, store, max_body_bytes)
    background = Background(answers)
    socket = ResponsesSocket(answers, max_body_bytes)
    routes = ResponseRoutes(answers, background)

    async def close(_: web.Application) -> None:
        await asyncio.gather(socket.close(), background.close())

    async def close_last(_: web.Application) -> None:
        await answers.close()

    app.on_shutdown.append(close)
    app.on_cleanup.append(close_last)
    app.add_routes(
        [
            web.post("/v1/responses", routes.create),
            web.get("/v1/responses", socket.connect, allow_head=False),
            web.post("/v1/responses/compact", routes.compact),
            web.get("/v1/responses/{id}", routes.get, allow_head=False),
            web.delete("/v1/responses/{id}", routes.delete),
            web.get("/v1/responses/{id}/input_items", routes.input_items, allow_head=False),
            web.post("/v1/responses/{id}/cancel", routes.cancel),
            web.get("/api/history", routes.figures),
        ]
    )


class ResponseRoutes:
    """The handlers."""

    def __init__(self, answers: Answers, background: Background) -> None:
        self._answers = answers
        self._background = background

    async def create(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses"""
        begun = time.monotonic()
        body = await request.read()
        head, ask = await head_of(body), await read_ask(body)
        if ask.background:
            return await self._run(request, ask, head)
        prepared = await self._answers.prepare(ask, head)
        sink = WebSink(request)
        await self._answers.answer(prepared, request[REQUEST_ID], sink, begun)
        return sink.response

    async def _run(self, request: web.Request, ask: Ask, head: Head) -> web.StreamResponse:
        """What runs in the background always streams: it can be listened to, and what it said is not lost
        when it is cancelled."""
        model = self._answers.library.resolve(head.model)
        prepared = await self._answers.prepare(ask, head, forced={"stream": True})
        # Its client hears of a body's faults now, not from a run that failed.
        await check(prepared.resolved)
        run = await self._background.begin(prepared, head.model or model.name, request[REQUEST_ID])
        if not head.stream:
            return web.Response(body=run.queued.response, content_type="application/json")
        sink = WebSink(request)
        await run.follow(sink, -1)
        return sink.response

    async def get(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}: the object, or its stream."""
        query = _query(request, {"stream", "starting_after", "include_obfuscation"} | _INCLUDE)
        if _flag(query, "include_obfuscation"):
            raise invalid("include_obfuscation", "include_obfuscation is not supported; leave it out")
        after = _number(query, "starting_after", 0, _MAX_NUMBER)
        if not _flag(query, "stream"):
            if after is not None:
                raise invalid("starting_after", "starting_after goes with stream=true; leave it out")
            record = await self._answers.lookup.find(request.match_info["id"])
            return web.Response(body=record.response, content_type="application/json")
        number = -1 if after is None else after
        sink = WebSink(request)
        run = self._background.get(request.match_info["id"])
        if run is not None:
            await run.follow(sink, number)
            return sink.response
        record = await self._answers.lookup.find(request.match_info["id"], events=True)
        data = await asyncio.to_thread(_events_of, record, number)
        await sink.start(EVENT_STREAM)
        if data:
            await sink.send(data)
        await sink.end()
        return sink.response

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}"""
        _query(request, set())
        response_id = request.match_info["id"]
        run = self._background.get(response_id)
        if run is not None:
            await run.stop("cancelled")
        try:
            deleted = await self._answers.store.delete(response_id)
        except Unavailable as err:
            raise unavailable(err) from None
        if not deleted:
            raise error("response_not_found", f"there is no response {cut(repr(response_id))} to delete")
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel"""
        _query(request, set())
        response_id = request.match_info["id"]
        record = await self._answers.lookup.find(response_id)
        if not record.background:
            raise invalid(
                "id",
                f"response {cut(repr(response_id))} does not run in the background; only those can be"
                " cancelled, any other ends when its client leaves",
            )
        run = self._background.get(response_id)
        if run is not None:
            await run.stop("cancelled")
            record = run.record
        return web.Response(body=record.response, content_type="application/json")

    async def input_items(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{id}/input_items"""
        query = _query(request, {"limit", "order", "after", "before"} | _INCLUDE)
        limit = _number(query, "limit", 1, input_items.MAX_LIMIT)
        order = _ORDERS.get(query.get("order", "desc"))
        if order is None:
            raise invalid("order", f"order is {quoted(query['order'])}; use asc or desc")
        if "before" in query:
            raise invalid("before", "before is not supported; use after, with the other order")
        record = await self._answers.lookup.find(request.match_info["id"])
        page = await asyncio.to_thread(
            input_items.page, record.input, limit or input_items.DEFAULT_LIMIT, order, query.get("after")
        )
        return json_response(page)

    async def compact(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses/compact"""
        body = await request.read()
        head, ask = await head_of(body), await read_ask(body)
        compact.check(ask.raws)
        prepared = await self._answers.prepare(ask, head, forced={"store": False})
        given = prepared.resolved.input
        if given is None and "input" in ask.raws:
            # No list and no text: its reader says what it is instead.
            await check(prepared.resolved)
        question = compact.question(prepared.resolved.raws, given)
        resolved = msgspec.structs.replace(prepared.resolved, body=question)
        carried = Prepared(resolved, head, None, store=False, background=False)
        sink = Captured()
        voice = partial(preamble_of, carried, recorder=Recorder(lambda *_: None))
        await self._answers.carry(carried, request[REQUEST_ID], sink, voice)
        if sink.status != 200:
            told = shifted(sink.body.decode(errors="replace"), resolved.shift).encode()
            return web.Response(status=sink.status, body=told, headers=dict(sink.headers))
        answer = await asyncio.to_thread(
            compact.compacted,
            sink.body,
            given or b"[]",
            f"resp_{secrets.token_hex(24)}",
            f"cmp_{secrets.token_hex(24)}",
        )
        return json_response(answer)

    async def figures(self, request: web.Request) -> web.Response:
        """GET /api/history"""
        _query(request, set())
        return json_response(self._answers.store.figures)


def _events_of(record: Record, number: int) -> bytes:
    """The stream of a response that has ended: as it was sent, else as it could have been. Raises ApiError
    400 for the number of an event that there is not."""
    told = record.events if record.events is not None else replay(msgspec.json.decode(record.response))
    data = b"".join(told)
    if number < 0:
        return data
    if number > (last := streams.last_number(data)):
        raise invalid(
            "starting_after", f"starting_after is {number}; the last event of this stream is {last}"
        )
    return streams.after(data, number)


def _query(request: web.Request, known: set[str] | frozenset[str]) -> Mapping[str, str]:
    """The query. Raises ApiError 400 for a name that is not known, or stands there twice."""
    for name in request.query:
        if name not in known:
            raise read.unknown_field(name, sorted(known - {"include[]"}))
        if name not in _INCLUDE and len(request.query.getall(name)) > 1:
            raise invalid(name, f"{name} stands in the query more than once; send it once")
    return request.query


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise invalid(name, f"{name} is {quoted(value)}; use true or false")
    return value == "true"


def _number(query: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    value = query.get(name)
    if value is None:
        return None
    # Digits alone: int() takes more, and thousands of them.
    number = int(value) if value.isascii() and value.isdigit() and len(value) <= 16 else -1
    if not low <= number <= high:
        raise invalid(name, f"{name} is {quoted(value)}; use a whole number from {low} to {high}")
    return number
