"""What a row says as the content blocks of Anthropic's Messages: which block a piece belongs to.

Blocks come in the order in which the model said them: its thinking, text, calls. Text of blanks alone makes
no block, because the protocol's own server takes none back: blanks at the beginning of one wait until
something follows them. A block ends where another kind begins, a call where its arguments do, or at the
answer's end. One answer, whole or streamed, is cut into blocks here alone, so the two can't differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from mlxpool.worker.text.events import (
    Reasoning,
    Text,
    TextEvent,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

Kind = Literal["thinking", "text", "tool_use"]


class Begun(msgspec.Struct, frozen=True):
    """A block begins, as number `index` of the answer. call: of a tool_use."""

    index: int
    kind: Kind
    call: ToolCallStart | None = None


class More(msgspec.Struct, frozen=True):
    """More of the block that is open: text, or JSON text of a call's input."""

    index: int
    kind: Kind
    text: str


class Ended(msgspec.Struct, frozen=True):
    """The block is complete. whole: a call's input is all of an object, not cut by a limit."""

    index: int
    kind: Kind
    whole: bool = True


Step = Begun | More | Ended


class Blocks:
    """One row's blocks; at most one is open."""

    def __init__(self) -> None:
        self._index = -1
        self._open: Kind | None = None
        self._blanks: list[str] = []  # text that makes no block yet

    def add(self, event: TextEvent) -> Iterator[Step]:
        """What this piece does to the blocks, in order."""
        match event:
            case Text(text):
                yield from self._say_text(text)
            case Reasoning(text):
                yield from self._say("thinking", text)
            case ToolCallStart():
                yield from self._begin("tool_use", event)
            case ToolCallArguments(_, text):
                yield More(self._index, "tool_use", text)
            case ToolCallEnd():
                yield from self.end(whole=True)

    def end(self, whole: bool = False) -> Iterator[Step]:
        """The open block, if there is one, ends. whole: a call's input is complete."""
        self._blanks.clear()
        if self._open is not None:
            yield Ended(self._index, self._open, whole or self._open != "tool_use")
            self._open = None

    def _say_text(self, text: str) -> Iterator[Step]:
        if self._open != "text":
            self._blanks.append(text)
            if not text.strip():
                return
            text = "".join(self._blanks)
        yield from self._say("text", text)

    def _say(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open != kind:
            yield from self._begin(kind)
        yield More(self._index, kind, text)

    def _begin(self, kind: Kind, call: ToolCallStart | None = None) -> Iterator[Step]:
        yield from self.end()
        self._index += 1
        self._open = kind
        yield Begun(self._index, kind, call)
