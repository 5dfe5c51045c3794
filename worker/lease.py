"""`POST /control/lease`: the GPU is somebody else's for as long as the answer is open.

The answer begins when the rows that were let in have ended; rows that come meanwhile wait in the engine's
queue and are not refused. The connection is the lease: the server cancels this handler when the other end
closes it, is killed, or gives up before it was answered. Leases are counted.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from mlxpool.shared.control import Lease
from mlxpool.shared.errors import error
from mlxpool.worker.engine.hold import Hold

LINE = msgspec.json.encode(Lease()) + b"\n"


async def lease(hold: Hold, request: web.Request) -> web.StreamResponse:
    """Ends by cancellation alone."""
    if (await request.read()).strip() not in (b"", b"{}"):
        raise error("invalid_request", "a lease takes no body; send none, or {}")
    await hold.take()
    try:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        await response.write(LINE)
        await asyncio.get_running_loop().create_future()
    finally:
        hold.give_back()
    raise AssertionError("nothing ends a lease but its connection")


async def idle_or_resting(idle: asyncio.Event, hold: Hold, timeout_s: float) -> None:
    """What a drain waits for before it writes: no open request, or none that goes on. Those that wait behind
    a lease are not waited for: nobody knows how long that takes."""
    waits = {asyncio.ensure_future(event.wait()) for event in (idle, hold.resting)}
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
