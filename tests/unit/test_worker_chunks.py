"""Prefill chunks: their width, their cuts, whose turn it is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared.memory import PREFILL_CHUNK_TOKENS
from mlxpool.worker.engine.chunks import (
    ALONE_S,
    LADDER_TOKENS,
    START_TOKENS,
    TARGET_S,
    ChunkWidth,
    company,
    next_turn,
)


def settle(width: ChunkWidth, seconds_per_token: float, start: int = 0, *, alone: bool = False) -> int:
    for _ in range(20):
        tokens = width.at(start, alone)
        width.observe(start, tokens, tokens * seconds_per_token, alone)
    return width.at(start, alone)


def test_a_slow_model_gets_narrow_chunks_and_a_fast_one_wide_ones() -> None:
    assert settle(ChunkWidth("cpu"), 0.3 / 64) == 64
    assert settle(ChunkWidth("cpu"), 1.0 / 64) == 16
    assert settle(ChunkWidth("cpu"), 0.0001) == PREFILL_CHUNK_TOKENS["cpu"]
    assert settle(ChunkWidth("cuda"), 0.00001) == PREFILL_CHUNK_TOKENS["cuda"] == LADDER_TOKENS[-1]


@given(st.floats(1e-6, 0.02), st.booleans())
def test_the_settled_width_keeps_to_the_target_where_any_rung_does(
    seconds_per_token: float, alone: bool
) -> None:
    width = settle(ChunkWidth("metal"), seconds_per_token, alone=alone)
    assert width * seconds_per_token <= (ALONE_S if alone else TARGET_S) or width == LADDER_TOKENS[0]


def test_a_row_that_keeps_nobody_waiting_gets_wider_chunks() -> None:
    width = ChunkWidth("cpu")
    assert settle(width, 0.6 / 64, alone=True) == 64
    assert settle(width, 0.6 / 64) == 32


def test_a_remainder_says_nothing_unless_even_it_was_slow() -> None:
    width = ChunkWidth("cpu")
    width.observe(0, 3, 0.001)
    assert width.tokens == START_TOKENS["cpu"]
    width.observe(0, 3, 1.0)
    assert width.tokens == START_TOKENS["cpu"] // 2


def test_short_prompts_do_not_widen_the_chunks_of_one_with_a_long_context_nor_it_narrow_theirs() -> None:
    width, long_token_s, short_token_s = ChunkWidth("cpu"), 0.4 / 32, 0.4 / 1024
    start, slowest_s = 20_000, 0.0
    settle(width, long_token_s, start)
    for _ in range(20):
        for _ in range(8):
            width.observe(0, width.tokens, width.tokens * short_token_s)
        assert width.tokens == PREFILL_CHUNK_TOKENS["cpu"]
        tokens = width.end(start, 30_000) - start
        width.observe(start, tokens, tokens * long_token_s)
        slowest_s = max(slowest_s, tokens * long_token_s)
        start += tokens
    assert slowest_s <= TARGET_S


def test_a_context_that_was_never_met_begins_with_narrower_chunks() -> None:
    width = ChunkWidth("cpu")
    assert settle(width, 0.001) == 256
    # The next stretch is about as dear as this one; one far away, as after a restored prefix, is not.
    assert width.at(1024) == 256
    assert width.at(2048) == 128
    assert width.at(20_000) == 32
    settle(width, 0.3 / 128, 20_000)
    assert width.at(20_000) == 128
    assert width.at(2048) == 128


def test_a_fixed_width_stays() -> None:
    width = ChunkWidth("cpu", fixed=48)
    width.observe(0, 48, 9.0)
    assert width.tokens == 48
    assert [width.end(0, 100), width.end(48, 100), width.end(96, 100)] == [48, 96, 100]
    assert width.end(9600, 10_000, alone=True) == 9648


@given(st.integers(0, 5000), st.sampled_from(["cpu", "metal"]))
def test_cuts_lie_on_an_absolute_grid(start: int, backend: str) -> None:
    width = ChunkWidth(backend)  # type: ignore[arg-type]
    end = width.end(start, 10_000)
    assert start < end <= start + width.at(start)
    assert end % width.at(start) == 0
    assert width.end(start, start) == start


def test_the_shortest_remaining_prompt_is_next() -> None:
    assert next_turn([300, 20, 100], [0, 0, 0], 64) == 1
    assert next_turn([50, 50], [0, 0], 64) == 0


def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_coming() -> None:
    remaining, passed_over, width, turns = 6400, 0, 64, 0
    while remaining > 0:
        turns += 1
        if next_turn([remaining, 64], [passed_over, 0], width) == 0:
            remaining, passed_over = remaining - width, 0
        else:
            passed_over += 1
        assert turns < 100 * 100
    assert turns <= 100 * 101 // 2


def test_short_prompts_that_fit_a_chunk_when_padded_share_a_pass_shortest_first() -> None:
    assert company(20, [30, 24, 22], 128) == [2, 1, 0]
    assert company(20, [30, 24, 22], 96) == [2, 1]
    assert company(20, [30, 24, 22], 43) == []
    assert company(20, [20] * 7, 160) == list(range(7))
    assert company(20, [], 1000) == []


def test_a_pass_is_never_padding_for_more_than_its_half() -> None:
    assert company(2, [500], 2048) == [0]
    assert company(2, [3, 500], 2048) == [0]
    assert company(500, [2, 3], 2048) == [0]
