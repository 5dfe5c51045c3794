"""One row's place in its grammar: the constraint that the engine asks before it samples.

A grammar that can be read in many ways (`root ::= root root | "a"`) compiles in no time and then takes longer
with every token: seconds for one, in which no other row gets any. So each call is timed, by the thread's own
processor time because a busy machine is nobody's fault, and a row whose grammar is too slow ends alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlxpool.shared.errors import error

# All rows wait for a call. A schema's takes less than one millisecond, also over a vocabulary of 150,000.
SLOW_S = 0.1

# The first call touches a grammar's memory for the first time, and now and then a machine hiccups.
_SLOW_CALLS_FORGIVEN = 1


class OpenCount:
    """How many constraints are open; they are made on one thread and released on the engine's."""

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
    """A `Constraint` over the compiler's matcher. Made on the grammar thread, then the engine thread's alone.

    A grammar that leads nowhere (a rule that is only itself, a character that no token can write) masks every
    token: its row ends with an error, for what was said by then is not of the form. A complete grammar of a
    model that has no token to end with masks every token too: there `over` says so. field: where the form was
    asked for. clock: seconds of the calling thread's processor time.
    """

    def __init__(
        self,
        matcher: Any,
        stop_ids: Sequence[int],
        opened: OpenCount,
        field: str = "grammar",
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher = matcher
        self._stop_ids = tuple(stop_ids)
        self._opened = opened
        self._field = field
        self._clock = clock
        self._over = False
        self._tokens = 0
        self._slow_calls = 0
        # Asked after each token where nothing else tells that the grammar is complete.
        self._own_mask: Any = None
        opened.change(1)

    @property
    def over(self) -> bool:
        """Whether the answer ends here because nothing may follow, not even a token that ends it."""
        return self._over and not self._stop_ids

    def fill(self, mask: Any) -> bool:
        """Write which tokens may come next into `mask` (int32 [ceil(vocabulary / 32)]); False where every
        one may, and the mask is not to be applied. Raises ApiError where the grammar leads nowhere, or is too
        slow to follow."""
        if not self._over:
            if not self._timed(self._matcher.fill_next_token_bitmask, mask):
                return False
            if mask.any():
                if not self._stop_ids and self._own_mask is None:
                    self._own_mask = np.zeros_like(mask)
                return True
            if self._stop_ids or not self._matcher.is_completed():
                raise error(
                    "unsupported_schema",
                    f"{self._field} leads nowhere: after {self._tokens} tokens of the answer it allows no "
                    "other, and not its end",
                    param=self._field,
                )
            self._over = True
        mask[:] = 0
        words = mask.view(np.uint32)
        for token in self._stop_ids:
            words[token // 32] |= np.uint32(1 << token % 32)
        return True

    def accept(self, token: int) -> bool:
        """Step over a sampled token; False when the grammar has no place for it. Raises ApiError where the
        grammar is too slow to follow."""
        if self._over:
            return token in self._stop_ids
        if not self._timed(self._matcher.accept_token, token):
            return False
        self._tokens += 1
        self._over = self._matcher.is_terminated()
        if not self._over and self._own_mask is not None:
            self._own_mask[:] = 0
            open_ended = not self._timed(self._matcher.fill_next_token_bitmask, self._own_mask)
            nothing_more = not (open_ended or self._own_mask.any())
            self._over = nothing_more and self._matcher.is_completed()
        return True

    def release(self) -> None:
        """Give the matcher back."""
        if self._matcher is not None:
            self._matcher = None
            self._over = True
            self._opened.change(-1)

    def _timed(self, call: Callable[[Any], bool], argument: Any) -> bool:
        began_s = self._clock()
        result = call(argument)
        took_s = self._clock() - began_s
        if took_s > SLOW_S:
            self._slow_calls += 1
            if self._slow_calls > _SLOW_CALLS_FORGIVEN:
                raise error(
                    "unsupported_schema",
                    f"{self._field} became too slow to follow at token {self._tokens} of the answer "
                    f"({took_s * 1000:.0f} ms for one token, {SLOW_S * 1000:.0f} are allowed); write it so "
                    "that a text can be read in one way only",
                    param=self._field,
                )
        return result
