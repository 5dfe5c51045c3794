"""Asking a served parent for jobs, as a client does: over HTTP."""

from __future__ import annotations

import json
from typing import Any

from tests.tools.served import Served, until

ENDED = ("done", "failed", "cancelled", "interrupted")
# What a job on the CPU takes at the longest, on a machine that is busy with others.
PATIENCE_S = 150.0


async def submit(served: Served, kind: str, **config: Any) -> dict[str, Any]:
    """The row of a job that was taken."""
    answer = await served.request("POST", "/api/jobs", {"kind": kind, "config": config})
    assert answer.status == 202, answer.body
    return dict(answer.body)


async def row(served: Served, job_id: str) -> dict[str, Any]:
    return dict((await served.request("GET", f"/api/jobs/{job_id}")).body)


async def until_done(served: Served, job_id: str) -> dict[str, Any]:
    """The job's result; it must be done."""
    seen: dict[str, Any] = {}

    async def ended() -> bool:
        seen.update(await row(served, job_id))
        return seen["status"] in ENDED

    await until(ended, PATIENCE_S, lambda: f"it is still {seen}")
    assert seen["status"] == "done", seen
    return dict(seen["result"])


async def run(served: Served, kind: str, **config: Any) -> dict[str, Any]:
    """The result of a job from its beginning to its end."""
    return await until_done(served, (await submit(served, kind, **config))["id"])


async def events(served: Served, job_id: str) -> list[dict[str, Any]]:
    """The log of a job that has ended."""
    answer = await served.request("GET", f"/api/jobs/{job_id}/events")
    assert answer.status == 200, answer.body
    lines = answer.body.decode().split("\n")
    return [dict(json.loads(line.removeprefix("data: "))) for line in lines if line.startswith("data: ")]
