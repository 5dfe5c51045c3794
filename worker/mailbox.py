"""The events of a request's rows on their way from the engine to its handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mlxpool.worker.text.events import Event


class Mailbox:
    """Event loop only."""

    def __init__(self) -> None:
        self._said: list[tuple[int, Event]] = []
        self._filled = asyncio.Event()

    def slot(self, index: int) -> Callable[[Sequence[Event]], None]:
        """Where the row with this place among the request's rows says what it has to say."""

        def put(events: Sequence[Event]) -> None:
            self._said.extend((index, event) for event in events)
            self._filled.set()

        return put

    async def take(self, timeout_s: float | None = None) -> list[tuple[int, Event]]:
        """Everything that has arrived; waits for something. Empty after `timeout_s` of silence."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._filled.wait()
        except TimeoutError:
            return []
        self._filled.clear()
        said, self._said = self._said, []
        return said
