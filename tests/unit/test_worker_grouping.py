"""Which rows share a forward pass: padding counts, and never takes more than the pool has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.engine.admission import KvCost, LayerKv
from mlxpool.worker.engine.grouping import held_bytes, to_merge, to_split

BYTE = KvCost((LayerKv(1),))  # a byte per token, in steps of 256


def arranged(groups: list[list[int]], cost: KvCost, pool_bytes: int) -> list[list[int]]:
    """As the batch does it: split while it must, then merge while it can."""
    while split := to_split(groups, cost, pool_bytes):
        group, row = split
        groups.append([groups[group].pop(row)])
    while merge := to_merge(groups, cost, pool_bytes):
        into, other = merge
        groups[into] += groups.pop(other)
    return groups


def test_every_row_is_counted_as_long_as_its_groups_longest() -> None:
    assert held_bytes([[256, 1024, 300], [256]], BYTE) == 3 * 1024 + 256


def test_padding_of_windowed_layers_ends_at_the_window() -> None:
    windowed = KvCost((LayerKv(1), LayerKv(10, 512)), fixed_bytes=7)
    assert held_bytes([[256, 30_000]], windowed) == 2 * (30_208 + 5120 + 7)


def test_rows_of_like_length_share_and_a_long_one_stays_alone() -> None:
    assert arranged([[30_000], [256], [256], [256]], BYTE, 31_000) == [[30_000], [256, 256, 256]]


def test_a_large_pool_lets_all_share() -> None:
    assert arranged([[1000], [256], [500]], BYTE, 10_000) == [[1000, 256, 500]]


def test_a_row_that_outgrows_the_pool_leaves_its_group() -> None:
    assert arranged([[2048, 256, 256]], BYTE, 3 * 2048) == [[2048, 256, 256]]
    assert arranged([[2304, 256, 256]], BYTE, 3 * 2048) == [[256, 256], [2304]]


def test_rows_alike_waste_nothing_and_are_never_split() -> None:
    assert to_split([[512, 512], [256]], BYTE, 0) is None
    assert to_split([], BYTE, 0) is None


@given(st.lists(st.lists(st.integers(1, 5000), min_size=1, max_size=4), max_size=4), st.integers(0, 40_000))
def test_the_pool_holds_what_was_arranged_whenever_the_rows_alone_fit(
    groups: list[list[int]], pool_bytes: int
) -> None:
    rows = sorted(length for group in groups for length in group)
    alone = held_bytes([[length] for length in rows], BYTE)
    made = arranged(groups, BYTE, pool_bytes)
    assert sorted(length for group in made for length in group) == rows
    assert held_bytes(made, BYTE) <= max(pool_bytes, alone)


def test_groups_that_are_to_stay_apart_are_left_as_they_are() -> None:
    assert to_merge([[100], [100], [500]], BYTE, 10_000, {0}) == (1, 2)
    assert to_merge([[100], [500]], BYTE, 10_000, {1}) is None
