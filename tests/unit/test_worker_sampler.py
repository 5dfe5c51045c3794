"""Draws depend on the row's seed and position, and on nothing else in the batch."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlxpool.worker.engine import sampler
from mlxpool.worker.engine.sampler import is_greedy, mix, sample
from mlxpool.worker.request.plan import Sampling


class Row:
    def __init__(self, seed: int = 0, sampled: int = 0, **changes: float) -> None:
        settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **changes}
        self.sampling = Sampling(seed=seed, **settings)  # type: ignore[arg-type]
        self.sampled = sampled
        self.xtc_keeps: Sequence[int] = ()
        self.noise = sampler.Noise(seed)


@pytest.fixture(scope="module")
def logits() -> mx.array:
    return mx.random.normal((1, 500), key=mx.random.key(3))


def draws(logits: mx.array, rows: list[Row]) -> list[int]:
    return sample(mx.concatenate([logits] * len(rows)), rows).tolist()  # type: ignore[return-value]


def test_a_draw_is_the_same_alone_and_together(logits: mx.array) -> None:
    alone = [draws(logits, [Row(seed, position)])[0] for seed in range(4) for position in range(4)]
    rows = [Row(seed, position) for seed in range(4) for position in range(4)]
    assert draws(logits, rows) == alone
    assert draws(logits, rows[::-1]) == alone[::-1]
    mixed = [Row(temperature=0.0), rows[5], Row(9, 9)]
    assert draws(logits, mixed)[1] == alone[5]


def test_draws_leave_mlxs_own_random_state_alone(logits: mx.array) -> None:
    mx.random.seed(1)
    expected = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(1)
    draws(logits, [Row(7), Row(8, top_p=0.5), Row(9, min_p=0.1), Row(9, top_k=5)])
    assert mx.random.uniform(shape=(3,)).tolist() == expected


def test_positions_and_seeds_differ(logits: mx.array) -> None:
    assert len({draws(logits, [Row(1, position)])[0] for position in range(20)}) > 10
    assert len({draws(logits, [Row(seed)])[0] for seed in range(20)}) > 10
    assert len({mix(seed, position) for seed in range(50) for position in range(50)}) == 2500
    assert 0 <= mix(2**64 - 1, 2**40) < 2**64


def test_temperature_zero_and_its_neighbourhood_are_the_most_likely_token(logits: mx.array) -> None:
    best = draws(logits, [Row(temperature=0.0)])[0]
    for temperature in (0.0, 1e-300, 1e-9):
        assert is_greedy(Row(temperature=temperature).sampling)
        assert draws(logits, [Row(temperature=temperature), Row(5)])[0] == best
    assert draws(logits, [Row(seed, temperature=0.001) for seed in range(20)]) == [best] * 20


@pytest.mark.parametrize(
    ("settings", "kept"), [({"top_k": 3}, {0, 1, 2}), ({"top_p": 0.6}, {0, 1}), ({"min_p": 0.7}, {0, 1})]
)
def test_a_filter_keeps_the_likeliest_and_all_of_them(settings: dict[str, float], kept: set[int]) -> None:
    logits = mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]]))
    assert set(draws(logits, [Row(seed, 0, **settings) for seed in range(200)])) == kept


@pytest.mark.parametrize("top_p", [1e-6, 1e-30, 1e-50, 5e-324])
def test_the_smallest_top_p_keeps_the_best_token(logits: mx.array, top_p: float) -> None:
    best = draws(logits, [Row(temperature=0.0)])[0]
    assert draws(logits, [Row(seed, top_p=top_p) for seed in range(20)]) == [best] * 20


def test_the_filters_keep_what_mlx_lms_filters_keep(logits: mx.array) -> None:
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for top_p, min_p, top_k in ((0.9, 0.02, 30), (0.5, 0.3, 400), (0.123, 0.001, 5), (0.99, 1.0, 1)):
        row = Row(top_p=top_p, min_p=min_p, top_k=top_k)
        expected = apply_top_k(apply_min_p(apply_top_p(logprobs, top_p), min_p), top_k)
        assert mx.array_equal(sampler._filtered(logprobs, row), expected)


def test_a_setting_never_seen_before_compiles_nothing(logits: mx.array) -> None:
    # A kernel compiled for a value stalls every stream of the model for a second, and is never given back.
    began_s = time.perf_counter()
    for step in range(20):
        draws(logits, [Row(step, top_p=0.31 + step * 0.001), Row(step, min_p=0.31 + step * 0.001)])
    assert time.perf_counter() - began_s < 10


def test_a_top_k_of_the_whole_vocabulary_is_off(logits: mx.array) -> None:
    for top_k in (500, 10**9):
        assert draws(logits, [Row(seed, top_k=top_k) for seed in range(10)]) == draws(
            logits, [Row(seed) for seed in range(10)]
        )


def test_draws_follow_the_distribution() -> None:
    probabilities = [0.5, 0.3, 0.2]
    logits = mx.log(mx.array([probabilities]))
    drawn = draws(logits, [Row(seed) for seed in range(3000)])
    for token, probability in enumerate(probabilities):
        assert drawn.count(token) / 3000 == pytest.approx(probability, abs=0.04)


def test_noise_is_of_its_seed_and_position_whatever_was_asked_before() -> None:
    seeds, positions = (0, 1, 2**63, 2**64 - 1), (0, 7, 8, 9, 100, 3)
    lines = {}
    for seed in seeds:
        noise = sampler.Noise(seed)
        for position in positions:
            line = noise.line(position, 101)
            assert mx.array_equal(line, sampler.Noise(seed).line(position, 101))
            noise.forget()
            assert mx.array_equal(line, noise.line(position, 101))
            lines[seed, position] = tuple(line[0].tolist())
    assert len(set(lines.values())) == len(seeds) * len(positions)


@pytest.mark.parametrize(
    "settings",
    [{}, {"top_p": 0.9}, {"xtc_probability": 0.5}, {"temperature": 0.3}, {"temperature": 0.0}, {"top_k": 9}],
    ids=str,
)
def test_rows_of_every_kind_draw_alone_what_they_draw_together(
    logits: mx.array, settings: dict[str, float]
) -> None:
    company = [Row(3), Row(4, temperature=0.0), Row(5, top_p=0.5), Row(6, temperature=0.0)]
    rows = [Row(seed, seed, **settings) for seed in range(6)]
    alone = [draws(logits, [row])[0] for row in rows]
    mixed = [row for pair in zip(rows, [*company, *company[:2]], strict=True) for row in pair]
    assert draws(logits, mixed)[::2] == alone
