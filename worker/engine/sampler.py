"""Draw a row's next token with the row's own randomness.

MLX's samplers read one global random state, so a row's tokens would depend on who else is in the batch.
Here a draw's randomness is made of the row's seed and the position of the token in its answer: the same seed
gives the same tokens alone and together. The filters mean what mlx-lm's mean and come in its
order, but are written out here: mlx-lm compiles each with its setting as a constant, so every value that
was not seen before costs a kernel compilation (1 to 2 s of the engine on the CPU backend) that is kept for
ever. Engine thread only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlxpool.worker.request.plan import Sampling

# Below it the best token's lead, divided by the temperature, leaves float32: that is greedy.
_GREEDY_BELOW = 1e-4

# Below it a float32 sum of probabilities can't tell it from 0, which would drop the best token too.
_TOP_P_LOW = 1e-7

_U64 = 2**64 - 1

# Noise drawn at once: with a vocabulary of 150,000 a block is 4.8 MB per row.
_NOISE_POSITIONS = 8

# Makes another stream of a row's seed; any odd number far from small seeds will do.
_XTC_STREAM = 0xD1B54A32D192ED03


class Drawn(Protocol):
    """What a draw knows of a row: its settings, how many tokens it has drawn, what XTC never removes."""

    sampling: Sampling
    sampled: int

    @property
    def xtc_keeps(self) -> Sequence[int]: ...

    @property
    def noise(self) -> Noise: ...


class Noise:
    """One row's Gumbel noise (Gumbel, 1954): the likeliest token once it is added is a draw.

    It depends on the row's seed and the position alone, and not on the logits, so it is made for a block of
    positions at once: on a GPU a draw of its own costs mostly the starting of a dozen kernels.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._block = -1
        self._lines: mx.array | None = None  # float32 [_NOISE_POSITIONS, vocabulary]

    def line(self, position: int, vocabulary: int) -> mx.array:
        """The noise [1, vocabulary] of the draw at `position` of the answer."""
        block, place = divmod(position, _NOISE_POSITIONS)
        if self._lines is None or block != self._block or self._lines.shape[-1] != vocabulary:
            key = mx.random.key(mix(self._seed, block))
            self._lines = mx.random.gumbel(shape=(_NOISE_POSITIONS, vocabulary), key=key)
            self._block = block
        return self._lines[place : place + 1]

    def forget(self) -> None:
        """Give the memory back; the same lines are made again when they are asked for."""
        self._lines = None


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
    drawn = [place for place, row in enumerate(rows) if not is_greedy(row.sampling)]
    if not drawn:
        return mx.argmax(logits, axis=-1)
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    greedy = [place for place, row in enumerate(rows) if is_greedy(row.sampling)]
    tokens = [mx.argmax(logits[mx.array(greedy)], axis=-1)]
    tokens.append(_draw(logits[mx.array(drawn)], [rows[place] for place in drawn]))
    return in_order(tokens, [greedy, drawn])


def in_order(parts: Sequence[mx.array], places: Sequence[Sequence[int]]) -> mx.array:
    """Arrays of some rows each, together the rows of `places`, as one array in the order of the rows."""
    order = np.concatenate([np.array(part) for part in places])
    return mx.concatenate(list(parts))[mx.array(np.argsort(order))]


def _draw(logits: mx.array, rows: Sequence[Drawn]) -> mx.array:
    """Tokens [rows] drawn from logits [rows, vocabulary]."""
    if any(_has_filters(row.sampling) for row in rows):
        each = [logits[place : place + 1].astype(mx.float32) for place in range(len(rows))]
        logits = mx.concatenate([_filtered(one, row) for one, row in zip(each, rows, strict=True)])
    # Float32, and so makes it of 16-bit logits too.
    rates = mx.array([[1 / row.sampling.temperature] for row in rows])
    noise = [row.noise.line(row.sampled, logits.shape[-1]) for row in rows]
    return mx.argmax(logits * rates + (mx.concatenate(noise) if len(rows) > 1 else noise[0]), axis=-1)


def _has_filters(sampling: Sampling) -> bool:
    return sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k > 0 or sampling.xtc_probability > 0


def _filtered(scores: mx.array, row: Drawn) -> mx.array:
    """One row's log-probabilities [1, vocabulary] with what its filters drop at minus infinity."""
    sampling = row.sampling
    if not _has_filters(sampling):
        return scores
    logprobs = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    if sampling.top_p < 1:
        logprobs = _top_p(logprobs, max(sampling.top_p, _TOP_P_LOW))
    if sampling.min_p > 0:
        best = mx.max(logprobs, axis=-1, keepdims=True)
        logprobs = _drop(logprobs, logprobs < best + math.log(sampling.min_p))
    if sampling.xtc_probability > 0 and _xtc_comes(row):
        logprobs = _xtc(logprobs, sampling.xtc_threshold, row.xtc_keeps)
    if 0 < sampling.top_k < logprobs.shape[-1]:
        dropped = mx.argpartition(-logprobs, kth=sampling.top_k - 1, axis=-1)[..., sampling.top_k :]
        logprobs = mx.put_along_axis(logprobs, dropped, mx.array(-math.inf), axis=-1)
    return logprobs


def _xtc_comes(row: Drawn) -> bool:
    """Whether XTC acts on this draw: a coin of the row's own, apart from what its draws use."""
    return mix(row.sampling.seed ^ _XTC_STREAM, row.sampled) < row.sampling.xtc_probability * 2**64


def _xtc(logprobs: mx.array, threshold: float, keeps: Sequence[int]) -> mx.array:
    """All tokens above the threshold but the least likely of them dropped, unless kept."""
    probabilities = mx.softmax(logprobs, axis=-1)
    least = mx.where(probabilities > threshold, probabilities, math.inf).min(axis=-1, keepdims=True)
    dropped = probabilities > least
    kept = [token for token in keeps if token < logprobs.shape[-1]]
    if kept:
        dropped[..., mx.array(kept)] = False
    return _drop(logprobs, dropped)


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
