"""How long the rest of a prompt takes behind a prefix whose keys and values are in place, and without one.

The model's own forward passes and one step, nothing else: what any cache has to be compared with, because
attention over the prefix is paid whatever the prefix cost.

Prints one JSON line: [seconds behind the prefix, seconds without].
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlxpool.worker.load import load

CHUNK_TOKENS = 32


def took_s(model: Any, caches: list[Any], ids: list[int]) -> float:
    began_s = time.perf_counter()
    last = len(ids) - 1
    for start in range(0, last, CHUNK_TOKENS):
        model(mx.array([ids[start : min(start + CHUNK_TOKENS, last)]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    mx.eval(model(mx.array([ids[last:]]), cache=caches))
    return time.perf_counter() - began_s


def behind(caches: list[Any], tokens: int) -> list[Any]:
    """Caches of the same shapes that hold so many tokens of noise, with room for more."""
    for cache in caches:
        assert type(cache) is KVCache
        rows, heads, _, width = cache.keys.shape
        cache.keys, cache.values = (
            mx.random.normal((rows, heads, tokens + 512, width)).astype(held.dtype)
            for held in (cache.keys, cache.values)
        )
        cache.offset = tokens
    mx.eval([cache.state for cache in caches])
    return caches


def main() -> None:
    folder, prefix_tokens, rest_tokens = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    loaded = load(folder, lambda _done, _total: None)
    ids = [100 + place % 1000 for place in range(rest_tokens)]
    shapes = loaded.make_cache()
    took_s(loaded.model, shapes, ids)
    with_prefix = took_s(loaded.model, behind(shapes, prefix_tokens), ids)
    without = took_s(loaded.model, loaded.make_cache(), ids)
    print(json.dumps([with_prefix, without]))


if __name__ == "__main__":
    main()
