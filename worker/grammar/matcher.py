"""One row's place in its grammar: the constraint that the engine asks before it samples."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np


class OpenCount:
    """How many constraints are open; they are made on the event loop and released on the engine's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def change(self, by: int) -> None:
        with self._lock:
            self._count += by


class MatcherConstraint:
    """A `Constraint` over the compiler's matcher. Made on the event loop, then the engine thread's alone.

    A grammar that leads nowhere (a rule that is only itself, a character that no token can write) would mask
    every token; the row ends there instead, as if the grammar were complete.
    """

    def __init__(self, matcher: Any, stop_ids: Sequence[int], opened: OpenCount) -> None:
        self._matcher = matcher
        self._stop_ids = tuple(stop_ids)
        self._opened = opened
        self._over = False
        opened.change(1)

    def fill(self, mask: Any) -> bool:
        """Write which tokens may come next into `mask` (int32 [ceil(vocabulary / 32)]); False where every
        one may, and the mask is not to be applied."""
        if not self._over:
            if not self._matcher.fill_next_token_bitmask(mask):
                return False
            if mask.any():
                return True
            self._over = True
        mask[:] = 0
        words = mask.view(np.uint32)
        for token in self._stop_ids:
            words[token // 32] |= np.uint32(1 << token % 32)
        return bool(self._stop_ids)

    def accept(self, token: int) -> bool:
        """Step over a sampled token; False when the grammar has no place for it."""
        if self._over:
            return token in self._stop_ids
        if not self._matcher.accept_token(token):
            return False
        self._over = self._matcher.is_terminated()
        return True

    def release(self) -> None:
        """Give the matcher back."""
        if self._matcher is not None:
            self._matcher = None
            self._over = True
            self._opened.change(-1)
