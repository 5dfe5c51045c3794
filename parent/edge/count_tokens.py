"""`POST /v1/messages/count_tokens`: how many tokens a prompt has, without a worker.

The body is read by Messages' own reader, rendered as a worker would render it and encoded with the model's
tokenizer, so that the figure is the one that `usage` has afterwards. The one exception is a form that a
worker finds out it can't enforce: it asks for it in words then, and those are not counted here. All of it
happens on a few threads: a long prompt holds up neither streams nor, with another thread beside it, the next
question.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from mlxpool.parent.library import Library
from mlxpool.shared.errors import error

from .relay import head_of
from .reply import json_response
from .tokenizers import Counter, Tokenizers

if TYPE_CHECKING:
    from mlxpool.shared.api.asked import Asked

# As in a worker: one long prompt doesn't keep a short one waiting, and more would take turns at the GIL.
_THREADS = 2


# Longer prompts are counted about: no model here has such a context, and encoding them would take gigabytes.
EXACT_TOKENS = 1_000_000


class TokenCount(msgspec.Struct, frozen=True):
    """The answer."""

    input_tokens: int


class CountTokens:
    """The handler, its tokenizers and its threads."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._tokenizers = Tokenizers()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="count")

    async def count(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens"""
        body = await request.read()
        model = self._library.resolve((await head_of(body)).model)
        run = asyncio.get_running_loop().run_in_executor
        asked = await run(self._threads, _read, body)
        counter = await self._tokenizers.of(model)
        tokens = await run(self._threads, _count, counter, asked)
        return json_response(TokenCount(tokens))

    async def close(self, _: web.Application) -> None:
        """End the threads; what they are at is left to them."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _read(body: bytes) -> Asked:
    from mlxpool.shared.api import anthropic

    return anthropic.parse_count(body)


def _count(counter: Counter, asked: Asked) -> int:
    from mlxpool.shared.chat import ChatTokenizerError

    try:
        text = counter.renderer.render(asked.request).text
        found = counter.tokenizer.encode_within(text, EXACT_TOKENS)
        return found if isinstance(found, int) else len(found)
    except ChatTokenizerError as err:
        raise error("load_failed", f"this model's tokenizer can't be used: {err}", param="model") from err
