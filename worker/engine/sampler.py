"""Draw a row's next token with the row's own randomness.

MLX's samplers read one global random state, so a row's tokens would depend on who else is in the batch.
Here every draw has its own key, made of the row's seed and the position of the token in its answer: the
same seed gives the same tokens alone and together. The filters mean what mlx-lm's mean and come in its
order, but are written out here: mlx-lm compiles each with its setting as a constant, so every value that
was not seen before costs a kernel compilation (1 to 2 s of the engine on the CPU backend) that is kept for
ever. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlxpool.worker.request.plan import Sampling

# Below it the best token's lead, divided by the temperature, leaves float32: that is greedy.
_GREEDY_BELOW = 1e-4

# Below it a float32 sum of probabilities can't tell it from 0, which would drop the best token too.
_TOP_P_LOW = 1e-7

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
        logprobs = _top_p(logprobs, max(sampling.top_p, _TOP_P_LOW))
    if sampling.min_p > 0:
        best = mx.max(logprobs, axis=-1, keepdims=True)
        logprobs = _drop(logprobs, logprobs < best + math.log(sampling.min_p))
    if 0 < sampling.top_k < logprobs.shape[-1]:
        dropped = mx.argpartition(-logprobs, kth=sampling.top_k - 1, axis=-1)[..., sampling.top_k :]
        logprobs = mx.put_along_axis(logprobs, dropped, mx.array(-math.inf), axis=-1)
    return logprobs


def _top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """The fewest likeliest tokens whose probabilities sum to `top_p`, and those as likely as the last."""
    ascending = mx.sort(logprobs, axis=-1)
    probabilities = mx.exp(ascending)
    likelier = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
    total = likelier[..., :1] + probabilities[..., :1]
    count = (likelier >= top_p * total).sum(axis=-1, keepdims=True)
    return _drop(logprobs, logprobs < mx.take_along_axis(ascending, count, axis=-1))


def _drop(logprobs: mx.array, dropped: mx.array) -> mx.array:
    return mx.where(dropped, -math.inf, logprobs)
