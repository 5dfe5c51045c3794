"""Slices that share their arrays: what is put together of them is the same, and memory is counted rightly."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpool.worker.cache.extents import Gathering, joined
from mlxpool.worker.cache.layers_memory import alias, of_their_own
from mlxpool.worker.cache.ram import Part, RamTier
from mlxpool.worker.cache.records import RECORD_TOKENS, Record, chain, root

ROOT = root("model")
HEADS, WIDTH = 2, 4
RECORD_BYTES = 2 * HEADS * RECORD_TOKENS * WIDTH * 4
PLENTY_BYTES = 1 << 30


def prefix(tokens: int, first: int = 0) -> Any:
    return np.arange(first, first + tokens, dtype=np.uint32)


def put(tier: RamTier, ids: Any) -> list[Record]:
    """Hold all slices of these tokens; a position's keys are its token, its values ten times that."""
    path = list(chain(ROOT, ids))
    for record in path:
        own = mx.array(ids[record.start : record.end].astype(np.float32)).reshape(1, 1, -1, 1)
        keys = mx.contiguous(mx.broadcast_to(own, (1, HEADS, record.end - record.start, WIDTH)))
        arrays = {"0.k": keys, "0.v": keys * 10}
        mx.eval(list(arrays.values()))
        tier.add(record, ids[record.start : record.end], "slice", Part(arrays))
    return path


def gather(tier: RamTier, *paths: list[Record]) -> None:
    gathering = Gathering(tier)
    for path in paths:
        gathering.want(path)
    while gathering.step():
        pass


def slice_of(tier: RamTier, record: Record) -> Part:
    part = tier.part(record.name, "slice")
    assert part is not None
    return part


def content(tier: RamTier, path: list[Record]) -> list[tuple[int, int, list[float]]]:
    """What `joined` gives: positions, and the tokens that its keys and values tell of."""
    told = []
    for start, end, arrays in joined(path, lambda record: slice_of(tier, record)):
        keys, values = np.array(arrays["0.k"]), np.array(arrays["0.v"])
        assert keys.shape == values.shape == (1, HEADS, end - start, WIDTH)
        assert (values == keys * 10).all()
        assert (keys == keys[:, :1, :, :1]).all()
        told.append((start, end, keys[0, 0, :, 0].tolist()))
    return told


@pytest.mark.parametrize("tokens", [2 * 256, 16 * 256, 17 * 256, 40 * 256 + 9])
def test_neighbours_are_one_piece_and_hold_what_they_held(tokens: int) -> None:
    tier = RamTier(PLENTY_BYTES)
    path = put(tier, prefix(tokens))
    before = tier.bytes
    gather(tier, path)
    told = content(tier, path)
    assert [token for _, _, tokens in told for token in tokens] == list(range(tokens))
    assert [start for start, _, _ in told] == [0, *(end for _, end, _ in told[:-1])]
    full, rest = divmod(tokens, RECORD_TOKENS)
    assert len(told) == -(-full // 16) + bool(rest)
    assert tier.bytes == before


def test_a_prefix_that_leaves_another_in_the_middle_shares_its_pieces() -> None:
    tier = RamTier(PLENTY_BYTES)
    one = put(tier, prefix(20 * 256))
    gather(tier, one)
    branch = np.concatenate([prefix(10 * 256), prefix(10 * 256, first=10**6)])
    other = put(tier, branch)
    gather(tier, other)
    assert [token for _, _, tokens in content(tier, other) for token in tokens] == branch.tolist()
    assert [(start, end) for start, end, _ in content(tier, other)] == [
        (0, 10 * 256), (10 * 256, 16 * 256), (16 * 256, 20 * 256),
    ]  # fmt: skip
    assert [token for _, _, tokens in content(tier, one) for token in tokens] == list(range(20 * 256))


def test_an_extent_is_counted_until_the_last_of_its_records_has_gone() -> None:
    tier = RamTier(PLENTY_BYTES)
    path = put(tier, prefix(16 * 256))
    gather(tier, path)
    for record in reversed(path[1:]):
        tier.drop(record, "slice")
        assert tier.bytes == 16 * RECORD_BYTES
    tier.drop(path[0], "slice")
    assert (tier.bytes, len(tier)) == (0, 0)


def test_eviction_goes_on_until_memory_is_really_free() -> None:
    tier = RamTier(2 * 16 * RECORD_BYTES)
    old, new = put(tier, prefix(16 * 256)), put(tier, prefix(16 * 256, first=10**6))
    gather(tier, old, new)
    tier.touch(old)
    tier.touch(new)
    gone = tier.evict(1)
    # The deepest extent, which an eighth of the memory holds.
    assert {one.record.name for one in gone} == {record.name for record in old[12:]}
    assert tier.bytes == 28 * RECORD_BYTES
    assert all(tier.has_slice(record.name) for record in new)


def test_an_extent_takes_at_most_an_eighth_of_the_memory() -> None:
    tier = RamTier(32 * RECORD_BYTES)
    path = put(tier, prefix(16 * 256))
    gather(tier, path)
    assert [end - start for start, end, _ in content(tier, path)] == [4 * 256] * 4


def test_where_an_extent_could_hold_one_record_nothing_is_copied() -> None:
    tier = RamTier(8 * RECORD_BYTES)
    path = put(tier, prefix(8 * 256))
    gather(tier, path)
    assert all(slice_of(tier, record).extent is None for record in path)


def test_slices_of_other_layers_are_not_joined() -> None:
    tier = RamTier(PLENTY_BYTES)
    path = put(tier, prefix(3 * 256))
    del slice_of(tier, path[1]).arrays["0.v"]
    gather(tier, path)
    assert all(slice_of(tier, record).extent is None for record in path)


def test_a_view_goes_to_disk_as_its_own_bytes_alone() -> None:
    tier = RamTier(PLENTY_BYTES)
    path = put(tier, prefix(4 * 256))
    before = [alias(slice_of(tier, record).arrays["0.k"]).tobytes() for record in path]
    gather(tier, path)
    own = [of_their_own(slice_of(tier, record).arrays)["0.k"] for record in path]
    assert all(alias(array).flags.c_contiguous for array in own)
    assert [alias(array).tobytes() for array in own] == before
