"""Buffers of keys and values that are made once for a whole prompt.

mlx-lm's cache grows by 256 tokens, and each time it copies all that it holds: behind 6,000 tokens that makes
every 64th narrow chunk on a CPU half as long again. A prompt's length is known from the start. Only the plain
cache is told; those with windows, quantised ones and states have rules of their own. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache


def make_room(caches: Sequence[Any], tokens: int) -> None:
    """The next time one of them grows it grows by so many tokens at least."""
    steps = max(1, -(-tokens // KVCache.step))
    _set_step(caches, steps * KVCache.step)


def grow_as_ever(caches: Sequence[Any]) -> None:
    """Undo `make_room`: what comes after the prompt is not known."""
    _set_step(caches, KVCache.step)


def _set_step(caches: Sequence[Any], step: int) -> None:
    for cache in caches:
        if type(cache) is KVCache:
            cache.step = step
        elif type(cache) is CacheList:
            _set_step(cache.caches, step)
