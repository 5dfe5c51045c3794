"""What the next layer's router is likely to ask for, asked one layer early.

A layer's normalised state is close to the next one's: only attention and this layer's own experts come
between. So the next layer's router, applied to this state under the next layer's norm, names about seven of
ten of its choices in time to read them. It is asked within the sync that the layer needs anyway. The least
likely of the choices is left out: it is wrong too often to be worth a read.

Where a model has no such router and norms in the usual places there is no lookahead; where a layer's guesses
turn out wrong they stop until the next turn; and where reads ahead don't get a turn before the layer is
there, fewer are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from mlxpool.shared.colibri.layout import ExpertLayout
from mlxpool.worker.colibri.load import module_at

# Below this share of right guesses a read ahead takes more from the disk than it gives.
LEAST_AGREEMENT = 0.55
# Passes before a layer's guesses are judged, and how much a new one counts from then on.
_FIRST_PASSES = 8
_WEIGHT = 1 / 16

# A norm's weight that is as good as zero tells nothing of the next one's.
_TINY = 1e-6

# What decoder layers call the norm before their router; where there are several, the first of these it is.
_NORMS = ("pre_mlp_layernorm", "pre_ff_layernorm", "ffn_norm", "post_attention_layernorm")

# state [..., D] → the likely experts of each token, likeliest first: [tokens, guessed].
Guess = Callable[[mx.array], mx.array]


class Gate:
    """Whether, and how much, is read ahead of one layer. Pure. guessed: experts per guess."""

    def __init__(self, guessed: int) -> None:
        self._guessed = guessed
        self.reset()

    def reset(self) -> None:
        self.agreement = 1.0
        self._passes = 0
        self.most = self._guessed

    @property
    def open(self) -> bool:
        return self._passes < _FIRST_PASSES or self.agreement >= LEAST_AGREEMENT

    def told(self, guessed: Collection[int], needed: Collection[int]) -> None:
        """What had been guessed, and what the layer then asked for."""
        if not guessed:
            return
        right = sum(expert in needed for expert in guessed) / len(guessed)
        self._passes += 1
        weight = max(_WEIGHT, 1 / self._passes)
        self.agreement += weight * (right - self.agreement)

    def turned(self, issued: int, unbegun: int) -> None:
        """Of so many reads ahead, so many hadn't begun when the layer's turn came."""
        if unbegun:
            self.most = max(1, issued - unbegun)
        elif issued >= self.most:
            self.most = min(self._guessed, self.most + 1)


def guesses(model: Any, layouts: Sequence[ExpertLayout], top_k: int) -> dict[int, Guess]:
    """By layer: what tells of the layer after it, where that one is streamed too and says how it routes.

    Experts must have been left in their places: paths of `layouts` are followed in `model`.
    """
    found: dict[int, Guess] = {}
    if top_k < 2:
        return found
    by_layer = {layout.layer: layout for layout in layouts}
    for layout in layouts:
        after = by_layer.get(layout.layer + 1)
        guess = None if after is None else _guess(model, layout, after, top_k)
        if guess is not None:
            found[layout.layer] = guess
    return found


def _guess(model: Any, layout: ExpertLayout, after: ExpertLayout, top_k: int) -> Guess | None:
    here, there = (_parents(model, one.module) for one in (layout, after))
    if here is None or there is None:
        return None
    first, second = (_scale(layer) for layer in (here[0], there[0]))
    router = getattr(there[1], "gate", getattr(there[1], "router", None))
    if router is None or first is None or second is None or first.shape != second.shape:
        return None
    if _width(layout) not in (first.size, None):
        # Experts are asked with something else than what their router is.
        return None
    small = mx.abs(first) < _TINY
    ratio = mx.where(small, 0.0, second / mx.where(small, 1.0, first)).astype(first.dtype)
    choose = _choice(router, mx.zeros((1, 1, first.size), first.dtype), after.experts, top_k - 1)
    if choose is None:
        return None
    mx.eval(ratio)
    return lambda x: choose((x * ratio).reshape(1, -1, ratio.size))


def _scale(layer: Any) -> mx.array | None:
    """What a layer's state is multiplied by on its way to its router: [D]."""
    norm = next((getattr(layer, name) for name in _NORMS if hasattr(layer, name)), None)
    weight = getattr(norm, "weight", None)
    if norm is None or not isinstance(weight, mx.array) or weight.ndim != 1:
        return None
    if isinstance(norm, nn.LayerNorm):
        return weight
    # Some norms' weights count from one; what comes of ones says it of all.
    scale: mx.array = norm(mx.ones((1, weight.size), weight.dtype))
    return scale.reshape(-1)


def _width(layout: ExpertLayout) -> int | None:
    """Numbers that an expert is asked with, which are as many as it answers with."""
    answers = (part for part in layout.parts if part.projection == "down_proj" and part.part == "weight")
    return next((part.shape[0] for part in answers), None)


def _parents(model: Any, path: str) -> tuple[Any, Any] | None:
    """The decoder layer and the block that a module is in."""
    block, _, _ = path.rpartition(".")
    layer, _, _ = block.rpartition(".")
    try:
        return module_at(model, layer), module_at(model, block)
    except (AttributeError, IndexError, KeyError, ValueError):
        return None


def _choice(router: Any, state: mx.array, experts: int, guessed: int) -> Guess | None:
    """What the router's answer to one state says of how to read its answers."""
    try:
        answer = router(state)
    except (TypeError, ValueError, AttributeError):
        return None
    if isinstance(answer, mx.array) and answer.shape[-1] == experts:
        return lambda x: _best(router(x), guessed)
    if not isinstance(answer, tuple) or len(answer) != 2:
        return None
    ids, scores = answer
    if not isinstance(ids, mx.array) or not isinstance(scores, mx.array) or ids.shape != scores.shape:
        return None
    if not mx.issubdtype(ids.dtype, mx.integer):
        return None

    def chosen(x: mx.array) -> mx.array:
        ids, scores = router(x)
        return mx.take_along_axis(ids, _best(scores, guessed), axis=-1)

    return chosen


def _best(scores: mx.array, count: int) -> mx.array:
    return mx.argsort(-scores, axis=-1)[..., :count]
