"""A worker's lease is its open answer: how it is told to be held, and how it breaks."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mlxpool.parent.pool import native_lease
from mlxpool.parent.pool.upstream import Upstream, UpstreamError

Piece = bytes | Exception


class Worker:
    """An upstream whose one answer comes in these pieces; after the last it is silent, where told so."""

    def __init__(self, *pieces: Piece, status: int = 200, silent: bool = False) -> None:
        self.status, self._pieces, self._silent = status, list(pieces), silent
        self.closed = False

    async def request(self, method: str, target: str) -> Worker:
        assert (method, target) == ("POST", "/control/lease")
        return self

    async def piece(self) -> bytes:
        if not self._pieces and self._silent:
            await asyncio.get_running_loop().create_future()
        piece: Piece = self._pieces.pop(0) if self._pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.closed = True


async def held(worker: Worker) -> tuple[bool, str]:
    """Whether it was ever said to be held, and how it broke."""
    said = []
    broke = await native_lease.hold(cast("Upstream", worker), lambda: said.append(True))
    assert worker.closed
    return bool(said), broke


@pytest.mark.parametrize(
    ("worker", "was_held", "broke"),
    [
        (Worker(b'{"state":"lea', b'sed"}\n'), True, "it ended its lease of the GPU"),
        (Worker(b'{"state":"leased"}\n', UpstreamError("gone")), True, "its lease of the GPU broke: gone"),
        (Worker(status=404), False, "it refuses a lease of the GPU with status 404"),
        (Worker(), False, "no line says that it is held"),
        (Worker(*[b"x" * 600] * 3), False, "no line says that it is held"),
        (Worker(b'{"state":"busy"}\n'), False, "it answers nonsense to a lease of the GPU"),
        (Worker(b'{"state":"\xff"}\n'), False, "it answers nonsense to a lease of the GPU"),
        (Worker(b'{"state":"leased","for":"ever"}\n'), False, "it answers nonsense to a lease of the GPU"),
    ],
)
async def test_a_lease_is_held_from_its_line_on_until_it_breaks(worker: Worker, was_held: bool, broke: str):
    said, why = await held(worker)
    assert said is was_held
    assert broke in why


async def test_giving_it_back_closes_the_connection():
    worker = Worker(b'{"state":"leased"}\n', silent=True)
    leased = asyncio.Event()
    holding = asyncio.create_task(native_lease.hold(cast("Upstream", worker), leased.set))
    await asyncio.wait_for(leased.wait(), 30)
    assert not worker.closed
    holding.cancel()
    await asyncio.wait({holding})
    assert worker.closed
