"""Who wants the engine to rest: while anybody does it admits nothing more, and it says when nothing runs.

Holds are counted. A *term* is the time from the first hold to the last one's end, and has a number: what the
engine says of a term that is over is heard by nobody, whatever thread is late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Hold:
    """`take` and `give_back` belong to the event loop, `term` is read and `rest` is called by the engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, nudge: Callable[[], None]) -> None:
        """nudge: makes the engine look at `term` before it sleeps."""
        self._loop = loop
        self._nudge = nudge
        self._holders = 0
        self._terms = 0
        self.term = 0  # of now, 0 for none; written by the event loop alone
        self.resting = asyncio.Event()  # nothing runs, and nothing will

    async def take(self) -> None:
        """Returns once nothing runs; whoever it returns to gives it back. Cancelled, it gives up."""
        self._holders += 1
        if self._holders == 1:
            self._terms += 1
            self.term = self._terms
            self._nudge()
        try:
            await self.resting.wait()
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """One holder less; with the last one the engine goes on."""
        self._holders -= 1
        if not self._holders:
            self.term = 0
            self.resting.clear()
            self._nudge()

    def rest(self, term: int) -> None:
        """Nothing runs in this term any more. The engine's thread."""
        self._loop.call_soon_threadsafe(self._rests, term)

    def _rests(self, term: int) -> None:
        if term == self.term:
            self.resting.set()
