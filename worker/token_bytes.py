"""What every token is as bytes, for log-probabilities.

Reading a whole vocabulary takes up to a second for the largest, and few requests ask for log-probabilities:
so it is done once, off the loop, when the first one asks. `TokenBytes` belongs to the event loop; what it
gives is never written again and read by the engine's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlxpool.shared.chat import ChatTokenizer


class TokenBytes:
    """The bytes of one model's tokens."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._reading: asyncio.Future[list[bytes]] | None = None

    async def by_id(self) -> Callable[[int], bytes]:
        """A token's bytes by its id: what it adds to a text, the space before a word included; the spelling
        of a special token, which adds nothing; b"" for an id that is none."""
        if self._reading is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(spelled_vocabulary, self._tokenizer))
        # A client that leaves must not take the reading along that others wait for.
        known = await asyncio.shield(self._reading)

        def token_bytes(token: int) -> bytes:
            return known[token] if token < len(known) else b""

        return token_bytes


def spelled_vocabulary(tokenizer: ChatTokenizer) -> list[bytes]:
    """The bytes of every token, by id; a special token as it is spelled."""
    known = tokenizer.vocabulary()
    for token, text in tokenizer.special_tokens.items():
        known[token] = text.encode()
    return known
