"""Body → request → rendered prompt → ids → plan, off the event loop.

Parsing, rendering and encoding a long prompt takes tens of milliseconds; a small pool of threads does
it, so that running streams and heartbeats don't wait for it. The tokenizer is shared and immutable.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import msgspec

from mlxpool.shared.api.chat import ChatRequest, parse
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.errors import error
from mlxpool.worker.request.plan import Defaults, Plan, Prompt, Vocabulary, make_plans
from mlxpool.worker.text.format import AnswerFormat

# Two: one long prompt doesn't keep a short one waiting; more would only take turns at the GIL.
_THREADS = 2


class Prepared(msgspec.Struct, frozen=True):
    """plans: one per choice, of one prompt. warnings: what the answer's `Warning` header says."""

    request: ChatRequest
    plans: tuple[Plan, ...]
    warnings: tuple[str, ...] = ()


class ChatPreparer:
    """Makes plans of chat bodies for one model. Call from the event loop; `close` ends its threads."""

    def __init__(self, tokenizer: ChatTokenizer, base: Defaults) -> None:
        self._tokenizer = tokenizer
        self._base = base
        newline = tuple(tokenizer.encode("\n"))
        self._vocabulary = Vocabulary(
            tokenizer.vocab_size, tokenizer.eos_ids, newline if len(newline) == 1 else ()
        )
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")

    async def prepare(self, body: bytes) -> Prepared:
        """Raises ApiError 400 for whatever is wrong with the body, its messages or its length."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._prepare, body)

    def _prepare(self, body: bytes) -> Prepared:
        request = parse(body)
        if not self._tokenizer.has_template:
            raise error(
                "invalid_request", "this model's folder has no chat template: it can't chat", param="model"
            )
        messages = [
            {"role": message.role, "content": message.content}
            | ({} if message.name is None else {"name": message.name})
            for message in request.messages
        ]
        ids = self._tokenizer.encode(self._tokenizer.render(messages))
        prompt = Prompt(tuple(ids), AnswerFormat(stops=request.stop))
        return Prepared(request, make_plans(request, prompt, self._base, self._vocabulary))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
