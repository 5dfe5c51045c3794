"""Token ids to text, as they come: the longest prefix that can no longer change.

Two kinds of vocabulary, two ways. In byte-level BPE every token is a known string of bytes, so an
incremental UTF-8 decoder is exact and costs the same for every token: only an incomplete character at
the end is held. Elsewhere (SentencePiece with byte fallback, WordPiece) a token's text depends on its
neighbours, so a short window of ids is decoded with and without the new token and the difference is the
new text; the window's start is kept one step behind, which is what keeps a decoder that strips the
leading space of a text from stripping one inside it. Tokens without text (special ones) don't count as
such a step. Either way the whole answer is the concatenation of
what was streamed, so the two can't differ.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Ids a window may hold while its text ends in an incomplete character, or while it has none. A character has
# at most 4 bytes: more ids than that which still end in a replacement character are not going to complete.
_HELD_IDS_LIMIT = 8


class Detokeniser(Protocol):
    """One row's ids to text; the row's owner calls `push` per token and `flush` at the end."""

    def push(self, token: int) -> str:
        """The text that `token` settles; may be empty."""

    def flush(self) -> str:
        """What was held; an incomplete character comes out as U+FFFD."""

    @property
    def in_character(self) -> bool:
        """Whether the last token ended inside a character."""


class ByteDetokeniser:
    """For byte-level vocabularies: token_bytes(id) is the token's bytes, b"" for special tokens.

    Words carry the space before them, so one space at the very start is the first word's, and left out;
    not with `continues`, where the text goes on from another one.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], continues: bool = False) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._begun = continues
        self._whole = True  # no character is incomplete

    def push(self, token: int) -> str:
        data = self._token_bytes(token)
        # Most tokens are nothing but letters of ASCII, and the incremental decoder is written in Python.
        text = data.decode() if self._whole and data.isascii() else self._decode(data)
        if text and not self._begun:
            self._begun = True
            return text.removeprefix(" ")
        return text

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._whole = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._whole = True
        return self._decoder.decode(b"", final=True)

    @property
    def in_character(self) -> bool:
        return not self._whole


class WindowDetokeniser:
    """For every other vocabulary: decode(ids) is the tokenizer's own decoding, special tokens skipped.

    before: ids of some text that comes before, whichever; a decoder that strips the space at a text's
    beginning leaves the answer's alone then.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(before)
        self._settled = len(self._ids)  # ids of the window whose text has been given out
        self._settled_text = decode(self._ids) if before else ""  # their decoding

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        held = len(self._ids) - self._settled
        if text.endswith(_REPLACEMENT) and held < _HELD_IDS_LIMIT:
            return ""
        return self._settle(text)

    def flush(self) -> str:
        return self._settle(self._decode(self._ids)) if self._ids else ""

    @property
    def in_character(self) -> bool:
        return len(self._ids) > self._settled

    def _settle(self, text: str) -> str:
        new = text[len(self._settled_text) :]
        if not new:
            # Kept where the window has no text of its own: its space may be the one that is stripped.
            if self._settled_text or len(self._ids) > _HELD_IDS_LIMIT:
                del self._ids[self._settled :]
            self._settled = len(self._ids)
            return ""
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        self._settled_text = self._decode(self._ids)
        return new
