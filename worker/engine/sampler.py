"""Draw a row's next token with the row's own randomness.

MLX's samplers read one global random state, so a row's tokens would depend on who else is in the batch.
Here every draw has its own key, made of the row's seed and the position of the token in its answer: the
same seed gives the same tokens alone and together. The filters are mlx-lm's, in mlx-lm's order. Engine
thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from mlxpool.worker.request.plan import Sampling

# Below it the best token's lead, divided by the temperature, leaves float32: that is greedy.
_GREEDY_BELOW = 1e-4

_U64 = 2**64 - 1


class Drawn(Protocol):
    """What the batch knows of a row when it samples: its settings, and how many tokens it has drawn."""

    sampling: Sampling
    sampled: int


def mix(seed: int, position: int) -> int:
    """64 well-mixed bits of a seed and a position (splitmix64; Steele, Lea and Flood, 2014)."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def is_greedy(sampling: Sampling) -> bool:
    """Whether the most likely token is taken; a temperature this low can't mean anything else."""
    return sampling.temperature < _GREEDY_BELOW


def sample(logits: mx.array, rows: Sequence[Drawn]) -> mx.array:
    """Next tokens [rows] from logits [rows, vocabulary]; one argmax where every row is greedy."""
    if all(is_greedy(row.sampling) for row in rows):
        return mx.argmax(logits, axis=-1)
    return mx.concatenate([_draw(logits[i : i + 1], row) for i, row in enumerate(rows)])


def _draw(logits: mx.array, row: Drawn) -> mx.array:
    """One row's next token [1] from its logits [1, vocabulary]."""
    sampling = row.sampling
    if is_greedy(sampling):
        return mx.argmax(logits, axis=-1)
    scores = logits.astype(mx.float32)
    if sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k > 0:
        # The filters read probabilities; a plain draw doesn't need them normalised.
        scores = _filtered(scores - mx.logsumexp(scores, axis=-1, keepdims=True), sampling)
    key = mx.random.key(mix(sampling.seed, row.sampled))
    return mx.random.categorical(scores * (1 / sampling.temperature), key=key)


def _filtered(logprobs: mx.array, sampling: Sampling) -> mx.array:
    """Log-probabilities [1, vocabulary] with what the filters drop at minus infinity."""
    if sampling.top_p < 1:
        logprobs = apply_top_p(logprobs, sampling.top_p)
    if sampling.min_p > 0:
        logprobs = apply_min_p(logprobs, sampling.min_p)
    if 0 < sampling.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, sampling.top_k)
    return logprobs
