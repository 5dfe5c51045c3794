"""Write JSON piece by piece so that it can be closed at any moment.

Whatever way a model writes its arguments, they go out as one JSON object, and this is what writes it: it
knows what is open, so `repair` can make valid JSON of what was sent. `take` gives what was written since.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec


def without_surrogates(text: str) -> str:
    """`text` as UTF-8 can carry it: half characters, which JSON's escapes can name, become U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class JsonWriter:
    """One JSON value. The caller keeps the order: a key before each value of an object. spelled: text
    with the characters of `Marks`, which no JSON can hold, as the markers they stand for."""

    def __init__(self, spelled: Callable[[str], str]) -> None:
        self._spelled = spelled
        self._parts: list[str] = []
        self._open: list[str] = []  # what closes each open container, the innermost last
        self._filled: list[bool] = []  # whether it has an element already
        self._in_string = False
        self._owes_value = False

    def twin(self) -> JsonWriter:
        """An empty writer of the same kind."""
        return JsonWriter(self._spelled)

    def take(self) -> str:
        """What was written since the last time."""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def open(self, bracket: str) -> None:
        """Begin an object (`{`) or an array (`[`)."""
        self._element()
        self._parts.append(bracket)
        self._open.append("}" if bracket == "{" else "]")
        self._filled.append(False)

    def close(self) -> None:
        """End the innermost container."""
        self._parts.append(self._open.pop())
        self._filled.pop()

    def key(self, name: str) -> None:
        """The next value's name."""
        self._element()
        self._parts.append(f"{self._quoted(name)}: ")
        self._owes_value = True

    def begin_string(self) -> None:
        self._element()
        self._parts.append('"')
        self._in_string = True

    def piece(self, text: str) -> None:
        """More of the string's text."""
        if text:
            self._parts.append(self._quoted(text)[1:-1])

    def end_string(self) -> None:
        self._parts.append('"')
        self._in_string = False

    def raw(self, text: str) -> None:
        """A whole value that is JSON already."""
        self._element()
        self._parts.append(text)

    def value(self, value: Any) -> None:
        """A whole value."""
        self.raw(without_surrogates(self._spelled(json.dumps(value, ensure_ascii=False))))

    def repair(self) -> None:
        """End everything that is open; a key without a value gets null."""
        if self._in_string:
            self.end_string()
        if self._owes_value:
            self.raw("null")
        while self._open:
            self.close()

    def _quoted(self, text: str) -> str:
        return msgspec.json.encode(self._spelled(text)).decode()

    def _element(self) -> None:
        """The comma before an element that is not the first, where a key did not bring one."""
        if self._owes_value:
            self._owes_value = False
        elif self._filled:
            if self._filled[-1]:
                self._parts.append(", ")
            self._filled[-1] = True
