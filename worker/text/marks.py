"""Markers that are tokens of their own, kept apart from text that only looks like them.

A special token has no text, so a marker such as Gemma's `<|tool_call>` would be lost in decoding; and the
same letters typed out of ordinary tokens are not that marker. So such a token travels through the machines as
one character that decoded text never holds: a lone surrogate. A machine then looks for plain strings whatever
the vocabulary is like: `form` says how a marker reads in this one. A vocabulary without a token for a marker
has it as its letters, matched across token borders.

`Marks` is made once per model and immutable; `TokenText` belongs to one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mlxpool.worker.text.detokeniser import Detokeniser

# The low surrogates: no decoder of UTF-8 gives one, and there are more of them than markers.
_FIRST_MARK = 0xDC00


class Marks:
    """tokens: texts of the markers to keep apart where they are special tokens; ordinary: those to keep apart
    also where they are tokens with a text. token_id: the id of a token's text, None where there is none;
    is_special: whether an id has no text of its own."""

    def __init__(
        self,
        tokens: Iterable[str] = (),
        token_id: Callable[[str], int | None] = lambda _: None,
        is_special: Callable[[int], bool] = lambda _: True,
        ordinary: Iterable[str] = (),
    ) -> None:
        self.ids: dict[int, str] = {}
        self._chars: dict[str, str] = {}
        self._spelled: dict[int, str] = {}
        self._plain: dict[int, str] = {}
        self._special: set[str] = set()
        # Longest first, so that a marker inside another one's text does not split it.
        kept = frozenset(ordinary)
        for token in sorted(kept.union(tokens), key=lambda token: (-len(token), token)):
            found = token_id(token)
            if found is None:
                continue
            special = is_special(found)
            if not (special or token in kept):
                continue
            char = chr(_FIRST_MARK + len(self._chars))
            self.ids[found] = char
            self._chars[token] = char
            self._spelled[ord(char)] = token
            self._plain[ord(char)] = "" if special else token
            if special:
                self._special.add(token)

    def form(self, marker: str) -> str:
        """How `marker`, which may be made of several tokens and letters, reads in this vocabulary."""
        for token, char in self._chars.items():
            marker = marker.replace(token, char)
        return marker

    def forms(self, marker: str) -> tuple[str, ...]:
        """`form`, and the letters too where the marker's tokens are ordinary text to this vocabulary."""
        form = self.form(marker)
        if form == marker or any(token in marker for token in self._special):
            return (form,)
        return (form, marker)

    def is_token(self, marker: str) -> bool:
        """`marker` holds a special token: letters can't be taken for it."""
        return any(token in marker for token in self._special)

    def plain(self, text: str) -> str:
        """Text for a reader: a special token that means nothing where it stands has none."""
        return text if text.isascii() or not self.ids else text.translate(self._plain)

    def spelled(self, text: str) -> str:
        """Text with every marker spelled out: what a call that can't be read is shown as."""
        return text if text.isascii() or not self.ids else text.translate(self._spelled)


class TokenText:
    """A detokeniser that gives the markers of `marks` as their characters. The row's owner calls it."""

    def __init__(self, detokeniser: Detokeniser, marks: Marks) -> None:
        self._detokeniser = detokeniser
        self._marks = marks.ids

    def push(self, token: int) -> str:
        """The text that `token` settles; a character cut by a marker comes out before it as U+FFFD."""
        mark = self._marks.get(token)
        if mark is None:
            return self._detokeniser.push(token)
        return self._detokeniser.flush() + mark

    def flush(self) -> str:
        return self._detokeniser.flush()

    @property
    def in_character(self) -> bool:
        return self._detokeniser.in_character
