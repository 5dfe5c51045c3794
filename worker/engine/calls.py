"""What others have run on the engine's thread, between two turns.

`ask` and `asked` belong to the event loop, `take` to the engine.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class Calls:
    """nudge: makes the engine look here before it sleeps."""

    def __init__(self, loop: asyncio.AbstractEventLoop, nudge: Callable[[], None]) -> None:
        self._loop = loop
        self._nudge = nudge
        self._waiting: deque[Callable[[], None]] = deque()
        self.asked = 0  # not answered yet

    async def ask(self, function: Callable[[], _T]) -> _T:
        """Have something run. Raises what it raises."""
        done: asyncio.Future[_T] = self._loop.create_future()

        def run() -> None:
            try:
                result = function()
            except Exception as err:
                self._loop.call_soon_threadsafe(_settle, done, None, err)
            else:
                self._loop.call_soon_threadsafe(_settle, done, result, None)

        self._waiting.append(run)
        self._nudge()
        self.asked += 1
        try:
            return await done
        finally:
            self.asked -= 1

    def take(self) -> Sequence[Callable[[], None]]:
        """What came until now, to be run in this order."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]


def _settle(future: asyncio.Future[_T], result: _T | None, failed: Exception | None) -> None:
    if future.done():
        return
    if failed is not None:
        future.set_exception(failed)
    else:
        future.set_result(result)  # type: ignore[arg-type]
