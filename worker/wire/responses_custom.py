"""The plain text of a custom tool's input, taken out of a function's arguments while they come.

A custom tool is shown to the model as a function of one string, so its arguments are `{"input": "…"}` as
JSON text, in pieces that may end anywhere. What is settled of the string goes out at once. Arguments of
another form are kept to their end, and then their best reading goes out whole. Pure; owned by the writer of
the one call.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from mlxpool.shared.api.response_tools import INPUT

_HEAD = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
# Longer beginnings have blanks that no model writes: they are read at their end like any other form.
_HEAD_LIMIT_CHARS = 256

_SPECIAL = re.compile(r'["\\]')
_UNIT = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNIT_CHARS = 6  # \uXXXX
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class CustomInput:
    """Push the arguments' pieces, then `end`; the texts returned make the input."""

    def __init__(self) -> None:
        self._state: Literal["head", "inside", "over", "other"] = "head"
        self._pieces: list[str] = []  # of arguments whose form is not known, or another
        self._held = ""  # the beginning of an escape

    def push(self, text: str) -> str:
        """What this piece settles of the input."""
        if self._state == "inside":
            return self._unescaped(text)
        if self._state == "over":
            return ""
        self._pieces.append(text)
        if self._state == "other":
            return ""
        head = "".join(self._pieces)
        found = _HEAD.match(head)
        if found is not None:
            self._state = "inside"
            return self._unescaped(head[found.end() :])
        self._pieces = [head]
        if len(head) > _HEAD_LIMIT_CHARS:
            self._state = "other"
        return ""

    def end(self, cut: bool = False) -> str:
        """The rest. cut: the arguments are not complete; of those that had no beginning nothing is said."""
        if cut or self._state in ("inside", "over"):
            return ""
        return _best_reading("".join(self._pieces))

    def _unescaped(self, text: str) -> str:
        text, self._held = self._held + text, ""
        out: list[str] = []
        place = 0
        while place < len(text):
            found = _SPECIAL.search(text, place)
            if found is None:
                out.append(text[place:])
                break
            out.append(text[place : found.start()])
            place = found.start()
            if text[place] == '"':
                self._state = "over"
                break
            taken = _escape(text[place : place + 2 * _UNIT_CHARS])
            if taken is None:
                self._held = text[place:]
                break
            meant, length = taken
            out.append(meant)
            place += length
        return "".join(out)


def _escape(text: str) -> tuple[str, int] | None:
    """What the escape that `text` begins with means, and its length; None where more of it must come."""
    if len(text) == 1:
        return None
    if text[1] != "u":
        return _ESCAPES.get(text[1], text[1]), 2
    if len(text) < _UNIT_CHARS:
        return None
    if not _UNIT.fullmatch(text[2:_UNIT_CHARS]):
        return _REPLACEMENT, 2
    unit = int(text[2:_UNIT_CHARS], 16)
    if 0xD800 <= unit < 0xDC00:
        return _pair(unit, text[_UNIT_CHARS:])
    if 0xDC00 <= unit < 0xE000:
        return _REPLACEMENT, _UNIT_CHARS
    return chr(unit), _UNIT_CHARS


def _pair(high: int, rest: str) -> tuple[str, int] | None:
    """The character of a high surrogate and what follows it."""
    if len(rest) < _UNIT_CHARS and "\\u".startswith(rest[:2]):
        return None
    if rest[:2] == "\\u" and _UNIT.fullmatch(rest[2:_UNIT_CHARS]):
        low = int(rest[2:_UNIT_CHARS], 16)
        if 0xDC00 <= low < 0xE000:
            return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)), 2 * _UNIT_CHARS
    return _REPLACEMENT, _UNIT_CHARS


def _best_reading(arguments: str) -> str:
    """The input that arguments of another form mean: their `input`, else their only text, nothing
    where they are none, else themselves."""
    try:
        held = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    if isinstance(held, dict):
        if isinstance(held.get(INPUT), str):
            return str(held[INPUT])
        if not held:
            return ""
        values = list(held.values())
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
    return arguments
