"""`GET /api/jobs/{id}/events`: a job's log as server-sent events, from any place in it on.

An event's `id` is the place behind it, in bytes of the log. So a browser that reconnects goes on exactly
where it was (`Last-Event-ID`), and so may anybody who has kept a number (`?offset=`), also after a restart.
"""

from __future__ import annotations

import re

from aiohttp import web

from mlxpool.parent.jobs.following import Readers
from mlxpool.parent.jobs.runner import Jobs
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .sink import EVENT_STREAM, WebSink

LAST_EVENT_ID = "Last-Event-ID"
_PLACE = re.compile(r"[0-9]{1,15}", re.ASCII)


class JobEvents:
    """The handler."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._readers = Readers(jobs.store, jobs.logs)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /api/jobs/{id}/events?offset=N&follow=true"""
        job = self._jobs.find(request.match_info["id"])
        stream = self._readers.read(job, _offset(request), _follow(request))
        try:
            await anext(stream)  # refuses before a stream has begun
            sink = WebSink(request)
            await sink.start(EVENT_STREAM)
            async for events in stream:
                await sink.send(events)
            await sink.end()
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        return sink.response


def _follow(request: web.Request) -> bool:
    """Whether to wait for what comes."""
    unknown = sorted(set(request.query) - {"offset", "follow"})
    if unknown:
        raise error(
            "invalid_request", f"{cut(unknown[0])!r} is unknown; use offset and follow", param=unknown[0]
        )
    text = request.query.get("follow", "true")
    if text not in ("true", "false"):
        raise error("invalid_request", f"follow is {cut(text)!r}; use true or false", param="follow")
    return text == "true"


def _offset(request: web.Request) -> int:
    """Where to begin: a browser that comes back knows better than the address it was given first."""
    if LAST_EVENT_ID in request.headers:
        name, text = LAST_EVENT_ID, request.headers[LAST_EVENT_ID]
    else:
        name, text = "offset", request.query.get("offset", "0")
    if not _PLACE.fullmatch(text):
        raise error(
            "invalid_request",
            f"{name} is {cut(text)!r}; use a number of bytes, as the id of an event is",
            param=name,
        )
    return int(text)
