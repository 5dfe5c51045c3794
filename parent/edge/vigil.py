"""A voice in the silence: something is said after a while, and again every so often, until someone answers.

The one who waits need not know: it waits as ever, and a timer speaks beside it. Nothing is made for a wait
that ends before the first word is due but that timer. `end` lets a word that is being said be finished, so
that whoever speaks next never falls into it; leaving by an error cuts it short, for an error must not wait
for a client that reads slowly (what a word has to say is handed over whole before it can be cut).

Owns its timer and its task; of one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType

Speak = Callable[[], Coroutine[None, None, None]]


class Vigil:
    """`async with Vigil(speak, first_s, then_s)`: seconds to the first word, and between words after it.

    A `speak` that raises is not called again; `end` raises what it raised.
    """

    def __init__(self, speak: Speak, first_s: float, then_s: float) -> None:
        self._speak = speak
        self._first_s = first_s
        self._then_s = then_s
        self._timer: asyncio.TimerHandle | None = None
        self._word: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Vigil:
        self._timer = asyncio.get_running_loop().call_later(self._first_s, self._due)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        if self._word is not None:
            self._word.cancel()
            await asyncio.gather(self._word, return_exceptions=True)

    async def end(self) -> None:
        """Somebody speaks now: returns when nothing is being said any more, and nothing will be."""
        if self._word is not None:
            await self._word
        self._stop()

    def _due(self) -> None:
        self._word = asyncio.get_running_loop().create_task(self._say())

    async def _say(self) -> None:
        await self._speak()
        self._timer = asyncio.get_running_loop().call_later(self._then_s, self._due)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
