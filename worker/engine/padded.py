"""Several short prompts in one forward pass, padded at their ends to the longest one's length.

A prompt that begins at position 0 and is padded at its end needs no mask of its own: no token sees what comes
after it, and what the padding left in the caches is cut off. So the pass runs on plain caches of several rows
with the model's usual causal mask, and works for models that can't decode rows of different lengths together
as well. It is right where a layer's cache is keys and values by position: not where a recurrent state has
taken the padding in, and in a sliding layer only while nothing has left the window. Engine thread only.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxpool.worker.engine.sharing import same_logits

# Any id that every vocabulary has: nothing reads what comes of it.
_PADDING_ID = 0


def longest(caches: Sequence[Any]) -> int:
    """Tokens that fresh caches of these classes may take in such a pass: 0 where a layer can't take part."""
    # Exactly these classes: one derived from them may keep more than it shows.
    if any(type(cache) not in (KVCache, RotatingKVCache) for cache in caches):
        return 0
    windows = [cache.max_size for cache in caches if type(cache) is RotatingKVCache]
    return min(windows, default=sys.maxsize)


def prefill(model: Any, caches: list[Any], prompts: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Put whole prompts through the model in one pass; returns each one's evaluated caches, in order.

    caches: fresh ones, used up. The prompts have at least one id and at most `longest` of them. Raises what
    the model raises.
    """
    width = max(len(prompt) for prompt in prompts)
    padded = [[*prompt, *[_PADDING_ID] * (width - len(prompt))] for prompt in prompts]
    model(mx.array(padded, dtype=mx.uint32), cache=caches)
    rows = [[_row(cache, row, len(prompt)) for cache in caches] for row, prompt in enumerate(prompts)]
    mx.eval([cache.state for row in rows for cache in row])
    return rows


def _row(cache: Any, row: int, tokens: int) -> Any:
    """A cache of one row's first tokens, without the memory of the others'."""
    own = copy.copy(cache)
    own.keys = mx.contiguous(cache.keys[row : row + 1, :, :tokens])
    own.values = mx.contiguous(cache.values[row : row + 1, :, :tokens])
    own.offset = tokens
    if isinstance(own, RotatingKVCache):
        own._idx = tokens
    return own


def works(model: Any, make_cache: Callable[[], list[Any]]) -> bool:
    """Whether prompts that shared a pass go on as each does alone: tried, once, when two could share one."""

    def shared(prompts: Sequence[Sequence[int]]) -> mx.array:
        rows = prefill(model, make_cache(), [ids[:-1] for ids in prompts])
        lasts = zip(prompts, rows, strict=True)
        return mx.concatenate([model(mx.array([ids[-1:]]), cache=own)[:, -1] for ids, own in lasts])

    try:
        return same_logits(model, make_cache, shared)
    except Exception:
        traceback.print_exc()
        return False
