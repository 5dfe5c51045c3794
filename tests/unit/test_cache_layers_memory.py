"""What records hold of memory, whose it is, and how others write into it."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlxpool.worker.cache import layers
from mlxpool.worker.cache.layers_kinds import Unfit
from mlxpool.worker.cache.layers_memory import alias, dtype_name, dtype_of, empty
from mlxpool.worker.cache.records import RECORD_TOKENS


@pytest.mark.parametrize("heads", [1, 2])
def test_records_keep_no_more_memory_than_their_own(heads: int) -> None:
    cache = KVCache()
    keys, values = mx.random.normal((2, 1, heads, 16 * RECORD_TOKENS, 64))
    cache.update_and_fetch(keys, values)
    layout = layers.layout_of([cache])
    assert layout is not None
    record_bytes = 2 * heads * RECORD_TOKENS * 64 * 4
    mx.eval(cache.state)
    kept = [layers.cut([cache], layout, start, start + RECORD_TOKENS) for start in (0, 1024)]
    mx.eval(kept)
    del cache, keys, values
    held_bytes = mx.get_active_memory()
    kept.clear()
    # Pages are given out whole.
    assert 2 * record_bytes <= held_bytes - mx.get_active_memory() < 2.5 * record_bytes


def test_the_next_chunk_writes_into_the_room_left_for_it() -> None:
    layout = layers.layout_of([KVCache()])
    assert layout is not None
    keys = mx.ones((1, 2, 100, 8))
    slices = [(0, 100, {"0.k": keys, "0.v": keys})]
    (roomy,) = layers.assemble(lambda: [KVCache()], layout, 100, slices, None, room_tokens=500)
    assert roomy.keys.shape == (1, 2, 768, 8)
    assert roomy.offset == 100
    roomy.update_and_fetch(mx.zeros((1, 2, 500, 8)), mx.zeros((1, 2, 500, 8)))
    assert roomy.keys.shape == (1, 2, 768, 8)
    assert keys.sum().item() == 1600


@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "U32", "I64", "U8", "BOOL"])
def test_what_is_written_through_an_alias_is_in_the_array(name: str) -> None:
    made = empty(dtype_of(name), (3, 2))
    assert dtype_name(made.dtype) == name
    ones = mx.ones((3, 2), dtype_of(name))
    alias(made)[:] = alias(ones)
    assert mx.array_equal(made, ones).item()
    assert alias(empty(dtype_of(name), (1, 2, 3, 0))).size == 0


def test_types_that_files_do_not_know_are_refused() -> None:
    with pytest.raises(Unfit):
        dtype_of("F8_E4M3")
