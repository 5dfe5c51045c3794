"""A prompt's keys and values get their buffer once, and answers grow as ever."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxpool.worker.engine.buffers import grow_as_ever, make_room


def put(cache: Any, tokens: int) -> int:
    """The length of its buffer after so many tokens more."""
    piece = mx.zeros((1, 1, tokens, 4))
    cache.update_and_fetch(piece, piece)
    return int(cache.keys.shape[2])


def test_a_buffer_for_all_of_a_prompt_is_made_with_its_first_chunk() -> None:
    cache = KVCache()
    make_room([cache], 1000)
    assert [put(cache, 64) for _ in range(15)] == [1024] * 15
    grow_as_ever([cache])
    assert put(cache, 64) == 1024
    assert put(cache, 1) == 1280


def test_what_a_restored_prefix_still_lacks_is_all_that_is_added() -> None:
    cache = KVCache()
    put(cache, 512)
    make_room([cache], 300)
    assert put(cache, 1) == 512 + 512


def test_caches_with_rules_of_their_own_are_left_alone() -> None:
    cache = RotatingKVCache(max_size=64)
    make_room([cache], 1000)
    assert put(cache, 16) <= 64
