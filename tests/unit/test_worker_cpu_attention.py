"""Attention on the CPU with a softmax of our own: the same weights as MLX's, whatever is masked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpool.worker import cpu_attention

# Scores of up to 30 in float32 lose that much; MLX's own loses up to three times as much.
TOLERANCE = 6e-6


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with mx.stream(mx.cpu):
        yield


def arrays(length: int, context: int, heads: int = 6, groups: int = 2, batch: int = 2, wide: int = 16) -> Any:
    mx.random.seed(length * 1000 + context)
    # As in a cache whose buffer is longer than what it holds.
    keys = mx.random.normal((batch, groups, context + 40, 16))[..., :context, :]
    values = mx.random.normal((batch, groups, context + 40, wide))[..., :context, :]
    return mx.random.normal((batch, heads, length, 16)) * 3, keys, values


def error(mask: Any, query: mx.array, keys: mx.array, values: mx.array) -> float:
    """How far it is from the same in float64."""
    ours = cpu_attention.attention(query, keys, values, scale=0.3, mask=mask)
    assert ours.dtype == mx.float32
    batch, heads, length, _ = query.shape
    context, wide = values.shape[2:]
    q, k, v = (np.array(array).astype(np.float64) for array in (query, keys, values))
    scores = 0.3 * q.reshape(batch, keys.shape[1], -1, q.shape[-1]) @ k.swapaxes(-1, -2)
    scores = scores.reshape(batch, heads, length, context)
    if mask is not None:
        seen = np.tri(length, context, context - length) > 0 if isinstance(mask, str) else np.array(mask)
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = weights.reshape(batch, keys.shape[1], -1, context) @ v
    return float(np.abs(np.array(ours) - expected.reshape(batch, heads, length, wide)).max())


@pytest.mark.parametrize(
    ("length", "context"), [(1, 6000), (2, 3000), (7, 1500), (74, 74), (64, 700), (300, 301)]
)
@pytest.mark.parametrize("mask", [None, "causal"])
def test_it_is_softmax_attention(length: int, context: int, mask: str | None) -> None:
    assert 12 * length * context >= cpu_attention._MIN_SCORES
    assert error(mask, *arrays(length, context)) < TOLERANCE


def test_values_may_be_wider_than_keys_and_every_head_may_have_its_own() -> None:
    assert error("causal", *arrays(40, 500, heads=4, groups=4, wide=48)) < TOLERANCE


def test_a_mask_of_a_window_and_one_of_padding() -> None:
    place = mx.arange(400)
    window = (place[None] <= 360 + mx.arange(40)[:, None]) & (place[None] > 300 + mx.arange(40)[:, None])
    assert error(window, *arrays(40, 400)) < TOLERANCE
    padding = mx.arange(400)[None, None, None] < mx.array([400, 250])[:, None, None, None]
    assert error(padding, *arrays(40, 400)) < TOLERANCE


def test_a_row_that_may_see_nothing_hurts_no_other() -> None:
    allowed = mx.ones((40, 400), dtype=mx.bool_)
    allowed[3] = False
    ours = cpu_attention.attention(*arrays(40, 400), scale=0.3, mask=allowed)
    theirs = cpu_attention._plain(*arrays(40, 400), scale=0.3, mask=allowed)
    assert not mx.isnan(ours).any().item()
    others = mx.array([row for row in range(40) if row != 3])
    assert mx.abs(ours[:, :, others] - theirs[:, :, others]).max().item() < 2 * TOLERANCE


def test_scores_beyond_what_an_exponential_holds() -> None:
    query, keys, values = arrays(40, 400)
    assert error("causal", query * 200, keys * 200, values) < TOLERANCE


def test_what_it_does_not_do_is_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []

    def plain(*given: Any, **named: Any) -> None:
        left.append(given[0].dtype.__repr__())

    monkeypatch.setattr(cpu_attention, "_plain", plain)
    query, keys, values = arrays(40, 400)
    bias = mx.zeros((40, 400))
    half = [array.astype(mx.bfloat16) for array in (query, keys, values)]
    for given, named in (
        (half, {"mask": "causal"}),
        ((query, keys, values), {"mask": bias}),
        ((query, keys, values), {"sinks": mx.zeros(6)}),
        (arrays(3, 5), {"mask": "causal"}),
    ):
        before = len(left)
        cpu_attention.attention(*given, scale=0.3, **named)
        assert len(left) == before + 1, named


def test_the_same_twice_to_the_bit() -> None:
    given = arrays(64, 700)
    one, two = (cpu_attention.attention(*given, scale=0.3, mask="causal") for _ in range(2))
    assert mx.array_equal(one, two).item()
