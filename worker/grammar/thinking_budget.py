"""The end of a row's reasoning once it has taken as many tokens as it may.

A constraint around the row's own, where it has one. It counts the tokens that are sampled inside the block of
reasoning; when they are spent, only the tokens of the closing tag may come, one after the other, and then the
row is as free as its own constraint leaves it. What the block is and whether it is open, the machines that
read the answer say: they know in which form a model opened it. The tag waits for the end of a character, and
where a grammar has no place for it nothing is forced at all. The engine thread's alone, like what it wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlxpool.worker.engine.constraint import Constraint
from mlxpool.worker.request.plan import ThinkingLimit
from mlxpool.worker.text.answer import AnswerText

# A character has four bytes at most, and a token one at least.
_CHARACTER_TOKENS = 4


class ThinkingBudget:
    """A `Constraint`. until: what closes the block that is open now, None outside of one. in_character:
    whether the last token ended inside a character."""

    def __init__(
        self,
        limit: ThinkingLimit,
        until: Callable[[], str | None],
        in_character: Callable[[], bool],
        inner: Constraint | None = None,
    ) -> None:
        self._limit = limit
        self._until = until
        self._in_character = in_character
        self._inner = inner
        self._spent = 0
        self._next: tuple[int, ...] = ()  # of the closing tag, what is still to come
        self._is_begun = False  # some of it has come
        self._shunned: tuple[int, ...] = ()  # what may not follow it
        self._has_closed = False  # with the last token
        self._gave_up = False

    @property
    def over(self) -> bool:
        return self._inner is not None and self._inner.over

    def fill(self, mask: Any) -> bool:
        """See `Constraint`."""
        masked = self._inner is not None and self._inner.fill(mask)
        if not self._next and self._is_due():
            self._next = self._limit.closings.get(self._until() or "", ())
        if self._next:
            if masked and not _has(mask, self._next[0]):
                # The form of the answer has no place for it just now; for half of it there never will be.
                self._gave_up = self._is_begun
                self._next = ()
                return True
            mask[:] = 0
            _set(mask, self._next[0])
            return True
        if self._shunned and not masked:
            mask[:] = -1
            for token in self._shunned:
                _clear(mask, token)
            return True
        return masked

    def accept(self, token: int) -> bool:
        """See `Constraint`."""
        inside = self._until() is not None
        self._spent += inside
        self._shunned, self._has_closed, self._is_begun = (), False, bool(self._next)
        if self._next and token == self._next[0]:
            self._next = self._next[1:]
            if not self._next:
                self._shunned, self._has_closed, self._is_begun = self._limit.not_then, True, False
        return self._inner is None or self._inner.accept(token)

    def release(self) -> None:
        """See `Constraint`."""
        if self._inner is not None:
            self._inner.release()

    def _is_due(self) -> bool:
        """Whether the block has to be closed now."""
        if self._gave_up or self._spent < self._limit.tokens or self._until() is None:
            return False
        if self._has_closed:
            # What should have closed it did not, and would not the next time.
            self._gave_up = True
            return False
        late = self._spent - self._limit.tokens
        return late >= _CHARACTER_TOKENS or not self._in_character()


def within_budget(
    limit: ThinkingLimit | None, text: AnswerText, inner: Constraint | None
) -> Constraint | None:
    """`inner`, held to the limit where there is one. text: the machines of the same row."""
    if limit is None:
        return inner
    return ThinkingBudget(limit, lambda: text.thinks_until, lambda: text.in_character, inner)


def _has(mask: Any, token: int) -> bool:
    return bool(mask.view(np.uint32)[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def _set(mask: Any, token: int) -> None:
    mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def _clear(mask: Any, token: int) -> None:
    mask.view(np.uint32)[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
