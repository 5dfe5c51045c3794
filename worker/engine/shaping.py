"""One row's logit bias and penalties: what is done to its logits before a grammar and the draw.

They mean what mlx-lm's logits processors mean, in its order. mlx-lm looks the window's tokens up anew for
every draw, which needs their values on the host: a step would wait for the one before. Here the window is
kept where the logits are, as a count per token of the vocabulary: the token just sampled is added while its
value is still being computed, and the one that leaves the window is one that the host knows already. So a
step costs the same for any length of history, and nothing waits. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxpool.worker.request.plan import Sampling


class _Window:
    """How often each token occurs among the last `context` ones, 0 for all of them."""

    def __init__(self, context: int) -> None:
        self._context = context
        self.counts: mx.array | None = None  # float32 [vocabulary]

    def move(self, fed: mx.array, ids: Sequence[int], position: int, vocabulary: int) -> None:
        """Take in `fed` [1], the token at `position`; ids: at least those before it."""
        begin = max(0, position - self._context) if self._context else 0
        if self.counts is None:
            before = np.array(ids[begin:position], dtype=np.int64)
            held = np.bincount(before[before < vocabulary], minlength=vocabulary)
            self.counts = mx.array(held.astype(np.float32))
        self.counts = self.counts.at[fed].add(1.0)
        if self._context and position >= self._context:
            self.counts = self.counts.at[ids[position - self._context]].add(-1.0)


class Shaping:
    """A row's own; `shaped` once per draw, in the order of the draws. `forget` starts the windows anew."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._bias: tuple[mx.array, mx.array] | None = None
        self._windows: dict[int, _Window] = {}

    @staticmethod
    def needed(sampling: Sampling) -> bool:
        """Whether these settings do anything to the logits."""
        return bool(sampling.logit_bias) or bool(_contexts(sampling))

    def forget(self) -> None:
        self._windows = {}

    @property
    def state(self) -> list[mx.array]:
        """What must be evaluated with each draw, lest it gather a graph."""
        return [window.counts for window in self._windows.values() if window.counts is not None]

    def shaped(self, logits: mx.array, fed: mx.array, ids: Sequence[int], position: int) -> mx.array:
        """Logits [1, vocabulary] float32 as they are after bias and penalties.

        fed [1]: the token that these logits follow, at `position` of all ids; ids: at least those before it.
        """
        sampling, vocabulary = self._sampling, logits.shape[-1]
        if sampling.logit_bias:
            if self._bias is None:
                known = [(token, value) for token, value in sampling.logit_bias if 0 <= token < vocabulary]
                self._bias = (
                    mx.array([token for token, _ in known], dtype=mx.int32),
                    mx.array([value for _, value in known], dtype=mx.float32),
                )
            logits = logits.at[:, self._bias[0]].add(self._bias[1])
        counts: dict[int, mx.array] = {}
        for context in _contexts(sampling):
            window = self._windows.setdefault(context, _Window(context))
            window.move(fed, ids, position, vocabulary)
            assert window.counts is not None
            counts[context] = window.counts
        if sampling.repetition_penalty != 1:
            penalty = sampling.repetition_penalty
            repeated = mx.where(logits < 0, logits * penalty, logits / penalty)
            logits = mx.where(counts[sampling.repetition_context] > 0, repeated, logits)
        if sampling.presence_penalty:
            logits = logits - (counts[sampling.presence_context] > 0) * sampling.presence_penalty
        if sampling.frequency_penalty:
            logits = logits - counts[sampling.frequency_context] * sampling.frequency_penalty
        return logits


def _contexts(sampling: Sampling) -> set[int]:
    """The windows that the penalties of these settings look at."""
    settings = (
        (sampling.repetition_penalty != 1, sampling.repetition_context),
        (sampling.presence_penalty != 0, sampling.presence_context),
        (sampling.frequency_penalty != 0, sampling.frequency_context),
    )
    return {context for on, context in settings if on}
