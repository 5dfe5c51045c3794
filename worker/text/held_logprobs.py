"""Log-probabilities of tokens whose text may still turn out to be a stop string.

A token's entry spells its text, so it must wait as long as the text does: nothing of a stop string is ever
sent. Positions are characters of the answer as it was written, markup and reasoning included. One row
owns one.
"""

from __future__ import annotations

from collections import deque

from mlxpool.worker.text.events import Logprobs


class HeldLogprobs:
    """Entries in the order of their tokens."""

    def __init__(self) -> None:
        self._held: deque[tuple[int, Logprobs]] = deque()

    def add(self, end: int, entry: Logprobs) -> None:
        """The next token's entry; `end`: where its text ends."""
        self._held.append((end, entry))

    def settled(self, upto: int) -> list[Logprobs]:
        """Those whose text ends at `upto` or before."""
        out: list[Logprobs] = []
        while self._held and self._held[0][0] <= upto:
            out.append(self._held.popleft()[1])
        return out

    def before(self, stop: str) -> list[Logprobs]:
        """The answer ended at this stop string: those that end before it. The rest is forgotten.

        It is looked for in the tokens' own bytes. Where it isn't there, because it was put together over
        markup, all that is held may be part of it.
        """
        held = [entry for _, entry in self._held]
        self._held.clear()
        left = b"".join(entry.chosen.data for entry in held).find(stop.encode())
        out: list[Logprobs] = []
        for entry in held:
            left -= len(entry.chosen.data)
            if left < 0:
                break
            out.append(entry)
        return out

    def all(self) -> list[Logprobs]:
        """The answer ended otherwise."""
        out = [entry for _, entry in self._held]
        self._held.clear()
        return out
