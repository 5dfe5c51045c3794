"""One worker's native lease: the answer of `POST /control/lease`, which says `leased` and stays open.

The connection is the lease: a parent that dies drops it, and a worker that dies ends it. Nothing is asked
again here: a lease that breaks says nothing of what its worker does now.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mlxpool.shared.control import Lease

from .upstream import Reply, Upstream, UpstreamError

PATH = "/control/lease"
# The line is a few bytes.
MAX_LINE_BYTES = 1024


async def hold(upstream: Upstream, leased: Callable[[], None]) -> str:
    """Ask, call `leased` once the worker computes nothing, hold on. Returns, for a person, how it broke; its
    task is cancelled to give the lease back."""
    try:
        async with await upstream.request("POST", PATH) as reply:
            if reply.status != 200:
                return f"it refuses a lease of the GPU with status {reply.status}"
            msgspec.json.decode(await _line(reply), type=Lease)
            leased()
            while await reply.piece():
                pass
    except UpstreamError as err:
        return f"its lease of the GPU broke: {err}"
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        return f"it answers nonsense to a lease of the GPU: {err}"
    return "it ended its lease of the GPU"


async def _line(reply: Reply) -> bytes:
    line = b""
    while b"\n" not in line:
        piece = await reply.piece()
        if not piece or len(line) > MAX_LINE_BYTES:
            raise UpstreamError("no line says that it is held")
        line += piece
    return line.partition(b"\n")[0]
