"""Split a model's reasoning from its answer, wherever token borders fall.

A block opens only at the answer's start or directly after a closed block (blanks between are nobody's), so
tags in the middle of an answer are text; where the opening tag is a token of its own it may also open at the
start of a line. A block that is never closed is reasoning to the end. A special token that opens a tool call
closes it too: models call tools out of their thoughts.

Templates write newlines of their own around the tags. They belong to neither side: one after the opening
tag, one before the closing tag, two after it. A block of blanks alone is no reasoning.

`ReasoningSplitter` belongs to one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlxpool.shared.prompt.reasoning_families import ReasoningFamily
from mlxpool.worker.text.find import Finder
from mlxpool.worker.text.marks import Marks

# Blanks between the start and a block, or at a block's beginning, that are waited through. Templates write
# two newlines; what writes more than this is not about to open a block.
BLANKS_CHARS = 64


class Piece(NamedTuple):
    """Some text, and whether it is reasoning."""

    text: str
    reasoning: bool


class ReasoningSplitter:
    """ends: what closes a block without being part of it. starts_inside: the prompt has opened the block."""

    def __init__(
        self,
        family: ReasoningFamily,
        marks: Marks,
        starts_inside: bool = False,
        ends: Sequence[str] = (),
    ) -> None:
        self._family = family
        self._closers: dict[str, Finder] = {}
        self._closings: dict[str, str] = {}
        for opening, closing in family.tags:
            closers = marks.forms(closing)
            for form in marks.forms(opening):
                self._closers[form] = Finder((*closers, *ends))
                self._closings[form] = closing
        self._ends = frozenset(ends)
        self._openers = tuple(self._closers)
        # Letters in the middle of an answer are never a tag; a token may be, at the start of a line.
        first = family.tags[0][0]
        self._dropped = frozenset(marks.form(marker) for marker in family.dropped)
        line_openers = {form for form in marks.forms(first) if form != first}
        self._in_answer = Finder(line_openers | self._dropped)
        self._held = ""
        self._last = "\n"  # the last character of the answer so far
        self._after_block = False
        self._out: list[Piece] = []
        self._state: Callable[[], bool] = self._start
        self._closer = Finder(())
        self._closing = ""
        longest = max(finder.longest for finder in self._closers.values())
        self.bound_chars = BLANKS_CHARS + max(longest, *(len(form) for form in self._openers))
        if starts_inside:
            self._open(self._openers[0])

    def push(self, text: str) -> list[Piece]:
        """Take the next text of the answer; give what is settled, in order, no piece empty."""
        if self._state == self._answer and not self._held and self._in_answer.nowhere(text):
            self._last = text[-1:] or self._last
            return [Piece(text, False)] if text else []
        self._held += text
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def flush(self) -> list[Piece]:
        """The answer ended: what was held is what it looked like so far."""
        held, self._held = self._held, ""
        if self._state == self._start and self._after_block and not held.strip():
            return []
        inside = self._state in (self._inside, self._entering)
        if self._state == self._entering:
            held = held if held.strip() else ""
        elif self._state == self._start:
            held = self._without_newlines(held)
        return [Piece(held, inside)] if held else []

    @property
    def held_chars(self) -> int:
        return len(self._held)

    @property
    def open_until(self) -> str | None:
        """The closing tag of the block that is open, as it is spelled; None outside of one."""
        return self._closing if self._state in (self._inside, self._entering) else None

    # Each state consumes from `_held` and says whether there may be more to do.

    def _start(self) -> bool:
        """Nothing but blanks so far: a block may open."""
        body = self._held.lstrip()
        blanks = len(self._held) - len(body)
        if blanks <= BLANKS_CHARS:
            for opener in self._openers:
                if body.startswith(opener):
                    self._held = body[len(opener) :]
                    self._open(opener)
                    return True
            if any(opener.startswith(body) for opener in self._openers):
                return False
        self._held = self._without_newlines(self._held)
        self._state = self._answer
        return True

    def _without_newlines(self, text: str) -> str:
        """The template's newlines after a block taken off."""
        if self._after_block:
            for _ in range(self._family.newlines[2]):
                text = text.removeprefix("\n")
        return text

    def _open(self, opener: str) -> None:
        self._closer, self._closing = self._closers[opener], self._closings[opener]
        self._state = self._entering

    def _entering(self) -> bool:
        """In a block that holds nothing but blanks so far."""
        body = self._held.lstrip()
        if len(self._held) - len(body) <= BLANKS_CHARS:
            found = self._closer.find(body)
            if found is not None and found.start == 0:
                self._close(body, found.what, 0)
                return True
            if self._closer.tail(body) == len(body):
                return False
        for _ in range(self._family.newlines[0]):
            self._held = self._held.removeprefix("\n")
        self._state = self._inside
        return True

    def _inside(self) -> bool:
        found = self._closer.find(self._held)
        end = len(self._held) - self._closer.tail(self._held) if found is None else found.start
        # The newlines before a closing tag are held with it: they may be the template's.
        kept = end
        for _ in range(self._family.newlines[1]):
            if kept and self._held[kept - 1] == "\n":
                kept -= 1
        if kept:
            self._out.append(Piece(self._held[:kept], True))
        if found is None:
            self._held = self._held[kept:]
            return False
        self._close(self._held, found.what, found.start)
        return True

    def _close(self, text: str, closer: str, start: int) -> None:
        """The block ends at `start`; what only ends it stays for the machines behind."""
        self._held = text[start:] if closer in self._ends else text[start + len(closer) :]
        self._after_block = True
        self._last = "\n"
        self._state = self._answer if closer in self._ends else self._start

    def _answer(self) -> bool:
        """Text, until a tag opens a block at the start of a line."""
        start = 0
        while (found := self._in_answer.find(self._held, start)) is not None:
            before = self._held[found.start - 1] if found.start else self._last
            if found.what in self._dropped or before == "\n":
                break
            start = found.start + len(found.what)
        end = len(self._held) if found is None else found.start
        end -= self._in_answer.tail(self._held, start) if found is None else 0
        if end:
            self._out.append(Piece(self._held[:end], False))
            self._last = self._held[end - 1]
        self._held = self._held[end:]
        if found is None:
            return False
        self._held = self._held[len(found.what) :]
        if found.what not in self._dropped:
            self._open(found.what)
        return True
