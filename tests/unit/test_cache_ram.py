"""The records in memory: what is used stays, what nothing builds on goes first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mlxpool.worker.cache.ram import Gone, Kind, Part, RamTier
from mlxpool.worker.cache.records import RECORD_TOKENS, Ids, Record, chain, root

ROOT = root("model")
SLICE_BYTES = 1000


def ids(*blocks: int, short: int = 0) -> Ids:
    """Full records that begin with these tokens, and a short one of zeros."""
    tokens = [[first, *range(1, RECORD_TOKENS)] for first in blocks]
    return np.array([token for block in tokens for token in block] + [0] * short, dtype=np.uint32)


def part(size: int = SLICE_BYTES) -> Part:
    return Part({"0.k": np.zeros(size, dtype=np.uint8)})


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def put(tier: RamTier, tokens: Ids, kind: Kind = "slice") -> list[Record]:
    """Hold every record of these tokens, as a row does."""
    path = list(chain(ROOT, tokens))
    for record in path:
        tier.add(record, tokens[record.start : record.end], kind, part())
    tier.touch(path)
    return path


def names(gone: Sequence[Gone]) -> list[bytes]:
    return [one.record.name for one in gone]


@pytest.fixture
def tier() -> RamTier:
    return RamTier(100 * SLICE_BYTES, Clock())


def test_a_shared_beginning_is_held_once(tier: RamTier) -> None:
    put(tier, ids(1, 2))
    put(tier, ids(1, 3))
    assert tier.bytes == 3 * SLICE_BYTES
    assert len(tier) == 3


def test_what_goes_is_least_recently_used_and_never_what_others_stand_on(tier: RamTier) -> None:
    old = put(tier, ids(1, 2, 3))
    new = put(tier, ids(1, 4))
    tier.max_bytes = 3 * SLICE_BYTES
    assert names(tier.evict()) == [old[2].name]
    tier.max_bytes = 0
    # Both stand on the first record: it goes last.
    assert names(tier.evict()) == [old[1].name, new[1].name, old[0].name]
    assert tier.bytes == 0
    assert len(tier) == 0


def test_room_is_made_for_what_is_to_come(tier: RamTier) -> None:
    path = put(tier, ids(1, 2))
    tier.max_bytes = 2 * SLICE_BYTES
    assert tier.evict() == []
    assert names(tier.evict(SLICE_BYTES)) == [path[1].name]


def test_a_prefix_that_is_asked_for_outlives_one_that_is_not(tier: RamTier) -> None:
    first, second = put(tier, ids(1)), put(tier, ids(2))
    tier.touch(first)
    tier.max_bytes = SLICE_BYTES
    assert names(tier.evict()) == [second[0].name]


def test_a_short_record_goes_when_a_longer_one_holds_its_tokens(tier: RamTier) -> None:
    short = put(tier, ids(1, short=10))[-1]
    other = put(tier, np.concatenate([ids(1), np.array([7, 7], np.uint32)]))[-1]
    longer = put(tier, ids(1, short=20))[-1]
    assert not tier.has_slice(short.name)
    assert tier.has_slice(other.name)
    assert tier.bytes == 3 * SLICE_BYTES
    assert {record.name for record in tier.children(longer.parent)} == {other.name, longer.name}


def test_a_state_stays_where_a_longer_record_has_its_slice(tier: RamTier) -> None:
    tokens = ids(1, short=10)
    short = put(tier, tokens)[-1]
    tier.add(short, tokens[short.start :], "state", part(50))
    put(tier, ids(1, short=20))
    assert not tier.has_slice(short.name)
    assert tier.has_state(short.name)
    assert tier.bytes == 2 * SLICE_BYTES + 50


def test_idle_records_are_named_oldest_first_and_only_they(tier: RamTier) -> None:
    first, second, third = put(tier, ids(1)), put(tier, ids(2)), put(tier, ids(3))
    tier.touch(first)
    assert names(tier.idle(1e9)) == [second[0].name, third[0].name, first[0].name]
    held = next(tier.parts())
    assert held.record == second[0]
    # Twice the clock is read per record: when it is added and when its path is used.
    assert names(tier.idle(5.0)) == [second[0].name]


def test_a_dropped_part_gives_its_bytes_back_and_leaves_the_other(tier: RamTier) -> None:
    tokens = ids(1)
    (record,) = put(tier, tokens)
    tier.add(record, tokens, "state", part(50))
    tier.drop(record, "slice")
    assert (tier.bytes, tier.has_slice(record.name), tier.has_state(record.name)) == (50, False, True)
    tier.drop(record, "state")
    tier.drop(record, "state")
    assert (tier.bytes, len(tier)) == (0, 0)
    assert list(tier.children(ROOT)) == []


def test_a_part_that_is_held_already_is_not_counted_twice(tier: RamTier) -> None:
    put(tier, ids(1))
    put(tier, ids(1))
    assert tier.bytes == SLICE_BYTES


def test_children_are_named_most_recently_used_first(tier: RamTier) -> None:
    first, second = put(tier, ids(1, 2))[1], put(tier, ids(1, 3))[1]
    assert [record.name for record in tier.children(first.parent)] == [second.name, first.name]
    tier.touch([first])
    assert [record.name for record in tier.children(first.parent)] == [first.name, second.name]
