"""`/api/jobs`: ask for long work, look at it, end it. Its events: jobs_events.py."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from mlxpool.parent.jobs.reading import MAX_CONFIG_BYTES
from mlxpool.parent.jobs.runner import Jobs
from mlxpool.parent.jobs.shape import shape_of
from mlxpool.shared.errors import error
from mlxpool.shared.text import cut

from .jobs_events import JobEvents
from .reply import json_response

# What a configuration may have, in whatever way it is written.
MAX_BODY_BYTES = 8 * MAX_CONFIG_BYTES


class JobBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /api/jobs`. config: what the kind takes."""

    kind: str
    config: dict[str, Any] = {}


class KindView(msgspec.Struct, frozen=True):
    """A kind of job. positional: fields that its command takes as arguments. gpu: whether nothing else
    computes while it runs. schema: of its config."""

    name: str
    summary: str
    positional: tuple[str, ...]
    gpu: bool
    schema: dict[str, Any]


class JobRoutes:
    """Handlers of the jobs."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    async def submit(self, request: web.Request) -> web.Response:
        """POST /api/jobs: the new row, or that of the same job where one is under way."""
        raw = await request.read()
        if len(raw) > MAX_BODY_BYTES:
            raise error(
                "invalid_request",
                f"the body has {len(raw)} bytes, and a job's at most {MAX_BODY_BYTES}; name a file instead",
            )
        try:
            body = msgspec.json.decode(raw, type=JobBody)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
            raise error(
                "invalid_request",
                f'{cut(str(problem))}; use {{"kind": "pull", "config": {{"name": "org/name"}}}}',
            ) from None
        return json_response(await self._jobs.submit(body.kind, body.config), 202)

    async def kinds(self, _: web.Request) -> web.Response:
        """GET /api/jobs/kinds: what can be asked for, and what each kind takes."""
        kinds = [
            KindView(kind.name, kind.summary, kind.positional, kind.gpu, shape_of(kind.config))
            for kind in self._jobs.kinds.values()
        ]
        return json_response({"kinds": kinds})

    async def rows(self, _: web.Request) -> web.Response:
        """GET /api/jobs, the newest first."""
        return json_response({"jobs": self._jobs.store.rows()})

    async def row(self, request: web.Request) -> web.Response:
        """GET /api/jobs/{id}"""
        return json_response(self._jobs.find(request.match_info["id"]))

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /api/jobs/{id}/cancel: at once; the row says when the process is gone."""
        return json_response(self._jobs.cancel(request.match_info["id"]), 202)


def add_job_routes(app: web.Application, jobs: Jobs) -> None:
    """The routes under /api/jobs."""
    routes = JobRoutes(jobs)
    app.add_routes(
        [
            web.get("/api/jobs", routes.rows),
            web.post("/api/jobs", routes.submit),
            web.get("/api/jobs/kinds", routes.kinds),
            web.get("/api/jobs/{id}", routes.row),
            web.get("/api/jobs/{id}/events", JobEvents(jobs).events),
            web.post("/api/jobs/{id}/cancel", routes.cancel),
        ]
    )
