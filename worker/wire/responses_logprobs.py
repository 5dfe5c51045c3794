"""Which log-probabilities belong to a message's text. Pure.

Every sampled token has one, and this protocol has a place for those of messages alone. They come before the
text that they made, and so do those of a marker that ended something else: the ones before a message that
its text does not begin with are not its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxpool.worker.text.events import Logprobs, TokenLogprob


def of_beginning(tokens: Sequence[Logprobs], text: str) -> list[Logprobs]:
    """Those of `tokens` that made `text`, with which a message begins."""
    start = 0
    made = text.encode()
    while start < len(tokens) - 1 and not _begins(made, tokens[start].chosen.data):
        start += 1
    return list(tokens[start:])


def _begins(text: bytes, token: bytes) -> bool:
    """Whether the text may begin with this token, which may be half a character, or have blanks at its head
    that were left out."""
    bare = token.lstrip()
    return text.startswith(token) or (bool(bare) and (text.startswith(bare) or bare.startswith(text)))


def body(entry: Logprobs) -> dict[str, Any]:
    """A token as this protocol shows it."""
    return {**_token(entry.chosen), "top_logprobs": [_token(token) for token in entry.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "bytes": list(token.data), "logprob": token.logprob}
