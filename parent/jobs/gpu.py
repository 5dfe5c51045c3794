"""What jobs need of the pool: the GPU for themselves, for a while."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Gpu(Protocol):
    """Whoever hands out exclusive leases; the pool does."""

    def exclusive(self, holder: str, memory_bytes: int) -> AbstractAsyncContextManager[None]:
        """The GPU, once it is this holder's turn: entered, no model computes until it is left.

        Requests that came before are served first, later ones wait. Models that are idle are unloaded where
        `memory_bytes` has no room beside them. holder: who it is, for people. Entering raises ApiError where
        it can never be granted, or the server stops; a task that is cancelled while it waits gives up its
        turn.
        """
