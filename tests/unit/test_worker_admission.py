"""Admission to the KV pool."""

from __future__ import annotations

from mlxpool.worker.engine.admission import GROWTH_BLOCK_TOKENS, KvCost, LayerKv, Projection, holds

FULL = KvCost(layers=(LayerKv(100), LayerKv(100)))


def row(prompt: int, max_tokens: int, generated: int = 0, limited: bool = True) -> Projection:
    return Projection(prompt, generated, max_tokens, limited)


def test_a_row_costs_whole_steps_of_every_layer() -> None:
    assert FULL.row_bytes(1) == 256 * 200
    assert FULL.row_bytes(256) == 256 * 200
    assert FULL.row_bytes(257) == 512 * 200


def test_a_sliding_layer_stops_growing_at_its_window_and_a_state_layer_never_grows() -> None:
    cost = KvCost(layers=(LayerKv(100), LayerKv(100, window_tokens=512)), fixed_bytes=7)
    assert cost.row_bytes(4096) == 4096 * 100 + 512 * 100 + 7


def test_rows_are_held_while_what_they_may_grow_to_fits() -> None:
    pool = FULL.row_bytes(1024) * 2
    assert holds([row(24, 1000), row(24, 1000)], FULL, pool) == 2
    assert holds([row(24, 1000), row(25, 1000)], FULL, pool) == 1
    assert holds([row(24, 1000), row(1, 1), row(24, 1000)], FULL, pool) == 2


def test_the_oldest_row_always_runs() -> None:
    assert holds([row(10_000, 10_000)], FULL, 1) == 1
    assert holds([row(10_000, 10_000), row(1, 1)], FULL, 1) == 1
    assert holds([], FULL, 1) == 0


def test_a_row_without_a_limit_is_counted_a_block_ahead_of_itself() -> None:
    assert row(10, 100_000, limited=False).tokens() == 10 + GROWTH_BLOCK_TOKENS
    assert row(10, 100_000, generated=GROWTH_BLOCK_TOKENS, limited=False).tokens() == (
        10 + 2 * GROWTH_BLOCK_TOKENS
    )
    assert row(10, 50, limited=False).tokens() == 60
    assert row(10, 100_000, limited=True).tokens() == 100_010
