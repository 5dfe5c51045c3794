"""The text that a reader reads: it arrives in pieces, and the reader waits inside its own code.

A reader is a generator: where it needs more text than there is, it yields, and goes on when some has come.
So a reader looks like one that has the whole answer before it, and every chunking gives it the same
characters in the same order. Decisions are made on what has been read, never on how much has arrived; that
is what keeps chunkings equal.

While `mark` is set the text from there on is kept, so that it can be given back as text. A reader that has
read more than `limit` characters past the mark is stopped. The machine owns the feed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from mlxpool.worker.text.find import Finder

_T = TypeVar("_T")

# A reader's step: yields while it waits for text, returns what it read.
Reading = Generator[None, None, _T]

BLANKS = " \t\r\n"
# Blanks beside a call that are waited through.
BLANKS_CHARS = 64


class Ended(Exception):
    """The answer ended where the reader expected more."""


class Broken(Exception):
    """What was read is not a call, or not one any more."""


class Feed:
    """text[at:] is unread. limit: characters that may be kept past a mark. ended: no more text comes;
    finished: because the model ended its answer, so what it left open is as it meant it."""

    __slots__ = ("at", "ended", "finished", "limit", "mark", "text")

    def __init__(self, limit: int) -> None:
        self.text = ""
        self.at = 0
        self.mark: int | None = None
        self.ended = False
        self.finished = False
        self.limit = limit

    def add(self, text: str) -> None:
        """More text; what is read and not marked is forgotten."""
        keep = self.at if self.mark is None else self.mark
        self.text = self.text[keep:] + text
        self.at -= keep
        if self.mark is not None:
            self.mark = 0

    def rest(self, finder: Finder) -> str:
        """What is unread, without the beginning of one of the finder's strings at its end."""
        return self.text[self.at : len(self.text) - finder.tail(self.text, self.at)]

    @property
    def held_chars(self) -> int:
        """Characters that arrived and are kept."""
        return len(self.text) - (self.at if self.mark is None else self.mark)

    def hold(self) -> bool:
        """Keep the text from here on; False when an earlier mark keeps it already."""
        if self.mark is not None:
            return False
        self.mark = self.at
        return True

    def release(self, marked: bool) -> None:
        """What `hold` kept is settled; pass its answer."""
        if marked:
            self.mark = None

    def need(self, count: int) -> Reading[None]:
        """Wait until `count` unread characters are there. Raises Ended, and Broken past the limit."""
        if self.mark is not None and self.at - self.mark > self.limit:
            raise Broken
        while len(self.text) - self.at < count:
            if self.ended:
                raise Ended
            yield

    def more(self, count: int) -> Reading[bool]:
        """`need`, for a value that the model's own end completes: False then, where `need` raises Ended."""
        try:
            yield from self.need(count)
        except Ended:
            if not self.finished:
                raise
            return False
        return True

    def peek(self) -> Reading[str]:
        """The next character, unread."""
        yield from self.need(1)
        return self.text[self.at]

    def solid(self) -> Reading[str]:
        """The next character that is not blank, unread; the blanks before it are read."""
        while True:
            yield from self.need(1)
            char = self.text[self.at]
            if char not in BLANKS:
                return char
            self.at += 1

    def take(self, string: str, behind_blanks: bool = False) -> Reading[bool]:
        """Read `string` if it comes next, else nothing. behind_blanks: blanks may stand before it, which are
        read with it."""
        skipped = 0
        while behind_blanks:
            yield from self.need(skipped + 1)
            if self.text[self.at + skipped] not in BLANKS or skipped == BLANKS_CHARS:
                break
            skipped += 1
        for size in range(1, len(string) + 1):
            yield from self.need(skipped + size)
            if self.text[self.at + skipped + size - 1] != string[size - 1]:
                return False
        self.at += skipped + len(string)
        return True

    def expect(self, string: str) -> Reading[None]:
        """Read `string`, blanks before it too. Raises Broken when something else comes."""
        yield from self.solid()
        if not (yield from self.take(string)):
            raise Broken

    def until(self, finder: Finder, limit: int) -> Reading[tuple[str, str]]:
        """The text before the first of the finder's strings, and that string; both are read. Raises Broken
        when the text is longer than `limit`."""
        looked = 0
        while True:
            # Only what is new can complete one; `at` stays where the text begins.
            found = finder.find(self.text, self.at + max(0, looked - finder.longest + 1))
            looked = len(self.text) - self.at
            if found is not None and found.start - self.at <= limit:
                text = self.text[self.at : found.start]
                self.at = found.start + len(found.what)
                return text, found.what
            if found is not None or looked > limit + finder.longest:
                raise Broken
            if self.ended:
                raise Ended
            yield
