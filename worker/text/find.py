"""Find the first of several short strings in text that arrives in pieces.

One question, asked by every machine of this package: where does one of my strings begin, and how much of the
end could still become one? Most pieces hold none of the characters that the strings begin with, and for those
the answer costs one look per character. Immutable: one finder serves all rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Found(NamedTuple):
    """The string that was found, and where it begins."""

    start: int
    what: str


class Finder:
    """Looks for any of `strings` (non-empty). `longest`: characters of the longest one."""

    def __init__(self, strings: Iterable[str]) -> None:
        # Longest first: of two that begin at one place the longer one is meant.
        self.strings = tuple(sorted(dict.fromkeys(strings), key=len, reverse=True))
        self.longest = max((len(string) for string in self.strings), default=0)
        self._firsts = tuple(dict.fromkeys(string[0] for string in self.strings))
        self._proper = tuple(
            (string[:size], size) for string in self.strings for size in range(len(string) - 1, 0, -1)
        )

    def nowhere(self, text: str) -> bool:
        """Neither a whole string nor the beginning of one is in `text`."""
        return all(first not in text for first in self._firsts)

    def find(self, text: str, start: int = 0) -> Found | None:
        """The earliest string at or after `start`, the longest of those that begin there."""
        best: Found | None = None
        for string in self.strings:
            end = len(text) if best is None else best.start + len(string) - 1
            at = text.find(string, start, end)
            if at >= 0:
                best = Found(at, string)
        return best

    def tail(self, text: str, start: int = 0) -> int:
        """How many characters at the end of `text[start:]` begin one of the strings without completing it."""
        window = text[max(start, len(text) - self.longest + 1) :]
        if not window or self.nowhere(window):
            return 0
        return max((size for begin, size in self._proper if window.endswith(begin)), default=0)
