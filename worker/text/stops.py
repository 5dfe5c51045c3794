"""Cut an answer at its first stop string, wherever token borders fall.

The matcher is given text as it is settled and gives back what may be sent. Nothing of a stop string is
ever sent, so a tail that could still become one is held, and nothing more than that tail. The earliest
match wins: the one that is complete first, and of those complete at once the one that began first. So a
reader of single characters and a reader of whole paragraphs stop at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stopped(NamedTuple):
    """text: what may be sent now. stop: the stop string that ended the answer, None while it goes on."""

    text: str
    stop: str | None


class StopMatcher:
    """One row's stop strings (non-empty). After a match it must not be fed again."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.bound_chars = max(map(len, self._stops), default=0)

    def push(self, text: str) -> Stopped:
        """Take the next text; say what may be sent and whether a stop string was met."""
        if not self._stops or not text:
            return Stopped(text, None)
        # Character by character would be the definition; a match can only end inside the new text, so
        # the first end among all stops is the moment a reader of single characters would have stopped.
        pending = self._held + text
        best: tuple[int, int, str] | None = None  # end, start, stop
        for stop in self._stops:
            start = pending.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None or candidate[:2] < best[:2] else best
        if best is not None:
            _, start, stop = best
            self._held = ""
            return Stopped(pending[:start], stop)
        keep = self._ambiguous_tail(pending)
        self._held = pending[len(pending) - keep :] if keep else ""
        return Stopped(pending[: len(pending) - keep], None)

    def flush(self) -> str:
        """The answer ended otherwise: the held tail is text after all."""
        held, self._held = self._held, ""
        return held

    @property
    def held_chars(self) -> int:
        return len(self._held)

    def _ambiguous_tail(self, pending: str) -> int:
        """Characters at the end of `pending` that begin some stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest
