"""Jobs without a process, for tests of what the GPU's loan does to requests.

A served parent that was started with `--lend` listens at `lend.sock` in its home: each connection sends one
line, a `Wish`, asks the pool's own `exclusive` for it, hears `Told` once it is lent or refused, and gives it
back by leaving. `Borrowed` is the test's end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from mlxpool.parent.pool.service import PoolService
from mlxpool.shared.errors import ApiError

SOCKET = "lend.sock"


class Wish(msgspec.Struct):
    """What a job asks for."""

    holder: str
    memory_bytes: int = 0


class Told(msgspec.Struct):
    """What it hears. code: of the ApiError, "" where it has the GPU."""

    code: str = ""
    message: str = ""


class LendingPool(PoolService):
    """The pool, with a door for jobs."""

    def start(self) -> None:
        super().start()
        self._door = self._loop.create_task(
            asyncio.start_unix_server(self._job, str(self.settings.home / SOCKET))
        )

    async def _job(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wish = msgspec.json.decode(await reader.readline(), type=Wish)
        holding = asyncio.ensure_future(self._hold(wish, writer))
        await reader.read()
        holding.cancel()
        await asyncio.wait({holding})
        writer.close()

    async def _hold(self, wish: Wish, writer: asyncio.StreamWriter) -> None:
        def tell(told: Told) -> None:
            writer.write(msgspec.json.encode(told) + b"\n")

        try:
            async with self.exclusive(wish.holder, wish.memory_bytes):
                tell(Told())
                await asyncio.get_running_loop().create_future()
        except ApiError as err:
            tell(Told(err.code, err.message))


class Borrowed:
    """A wish under way. `told` waits for the pool's word; `give_back` is over once the pool has seen it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def told(self) -> Told:
        return msgspec.json.decode(await asyncio.wait_for(self._reader.readline(), 60), type=Told)

    async def give_back(self) -> None:
        if self._writer.can_write_eof():
            with contextlib.suppress(OSError):
                self._writer.write_eof()
        await self._reader.read()
        self._writer.close()


@contextlib.asynccontextmanager
async def borrow(home: Path, holder: str, memory_bytes: int = 0) -> AsyncIterator[Borrowed]:
    """Ask the parent of this home for the GPU; gives it back at the end at the latest."""
    reader, writer = await asyncio.open_unix_connection(str(home / SOCKET))
    writer.write(msgspec.json.encode(Wish(holder, memory_bytes)) + b"\n")
    borrowed = Borrowed(reader, writer)
    try:
        yield borrowed
    finally:
        await borrowed.give_back()
