"""Cut an answer at its first stop string, wherever token borders fall.

The matcher is given text as it is settled and gives back what may be sent. Nothing of a stop string is
ever sent, so a tail that could still become one is held, and nothing more than that tail. The earliest
match wins: the one that is complete first, and of those complete at once the one that began first. So a
reader of single characters and a reader of whole paragraphs stop at the same place.

How much of each stop string the text ends with is carried from piece to piece, with the failure function of
Knuth, Morris and Pratt: a character costs a constant per stop string whatever the strings are, and nothing
where none of them begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Stopped(NamedTuple):
    """text: what may be sent now. stop: the stop string that ended the answer, None while it goes on."""

    text: str
    stop: str | None


class _Progress:
    """How far into one stop string the text has come: `matched` of its characters end the text so far."""

    __slots__ = ("_border", "_falls", "matched", "string")

    def __init__(self, string: str) -> None:
        self.string = string
        self.matched = 0
        # By how much is matched, where to go on when the next character is another one: the longest beginning
        # that ends the matched part too and does not fail on the same character. As far as it was needed.
        self._falls = [0]
        self._border = 0  # the longest beginning that ends the last of these parts

    def read(self, text: str, end: int) -> int | None:
        """Go on through text[:end]; the place behind the string's first end in it, where it stays."""
        string, falls, matched, at = self.string, self._falls, self.matched, 0
        while at < end:
            if not matched:
                at = text.find(string[0], at, end)
                if at < 0:
                    break
            elif text[at] != string[matched]:
                matched = falls[matched]
                continue
            matched += 1
            at += 1
            if matched == len(string):
                self.matched = matched
                return at
            if matched == len(falls):
                self._learn()
        self.matched = matched
        return None

    def _learn(self) -> None:
        """One more of the falls, so that no token pays for many."""
        string, falls, border = self.string, self._falls, self._border
        size = len(falls)
        if size > 1:
            last = string[size - 1]
            while border and string[border] != last:
                border = falls[border]
            border += string[border] == last
        self._border = border
        falls.append(falls[border] if string[border] == string[size] else border)


class StopMatcher:
    """One row's stop strings (non-empty). After a match it must not be fed again."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_Progress(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.bound_chars = max((len(stop.string) for stop in self._stops), default=0)

    def push(self, text: str) -> Stopped:
        """Take the next text; say what may be sent and whether a stop string was met."""
        if not self._stops or not text:
            return Stopped(text, None)
        end, met = len(text), None
        for stop in self._stops:
            found = stop.read(text, end)
            # What ends later than another was not reached by a reader of single characters.
            if found is not None and (met is None or found < end or len(stop.string) > len(met)):
                end, met = found, stop.string
        pending = self._held + text
        if met is not None:
            start = len(self._held) + end - len(met)
            self._held = ""
            return Stopped(pending[:start], met)
        keep = max(stop.matched for stop in self._stops)
        self._held = pending[len(pending) - keep :] if keep else ""
        return Stopped(pending[: len(pending) - keep], None)

    def flush(self) -> str:
        """The answer ended otherwise, or no text follows: the held tail is text after all."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.matched = 0
        return held

    @property
    def held_chars(self) -> int:
        return len(self._held)
