"""Whether rows of a model may share a forward pass: tried, not looked up."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

# Prompts of the probe; every vocabulary has these ids, and the padding between the two is most of it.
_PROBE_SHORT = (5, 3)
_PROBE_LONG = (7, 2, 11, 4, 13, 6, 1, 9, 8, 10, 12, 14)

# Largest difference between shared and lone logits, as a share of that between the two prompts' own: far
# above what rounding does in 16 bits, far below what reading a wrong mask does (Gemma 2: 1).
_PROBE_TOLERANCE = 0.2


def shares_passes(model: Any, make_cache: Callable[[], list[Any]]) -> bool:
    """Whether rows of different lengths in one forward pass get the logits that each gets alone.

    Not every cache has a batch version, and not every model of mlx-lm reads those rightly: some take the
    offset for one number, and Gemma 2 takes the mask of rows for one of heads, without an error. So it is
    tried, once, while nothing runs or when a second row comes.
    """

    def shared(prompts: Sequence[Sequence[int]]) -> mx.array:
        prefilled = [make_cache() for _ in prompts]
        for ids, caches in zip(prompts, prefilled, strict=True):
            model(mx.array([ids[:-1]]), cache=caches)
            mx.eval([cache.state for cache in caches])
        merged = [one.merge([one, two]) for one, two in zip(*prefilled, strict=True)]
        lasts: mx.array = model(mx.array([ids[-1:] for ids in prompts]), cache=merged)[:, -1]
        return lasts

    try:
        same = same_logits(model, make_cache, shared)
    except Exception:
        traceback.print_exc()
        same = False
    if not same:
        sys.stderr.write("rows of this model can't share a forward pass: each gets one of its own\n")
        sys.stderr.flush()
    return same


def same_logits(
    model: Any,
    make_cache: Callable[[], list[Any]],
    shared: Callable[[Sequence[Sequence[int]]], mx.array],
) -> bool:
    """Whether `shared` gives two prompts the logits [2, vocabulary] after them that each gets alone.

    Raises what the model and its caches raise.
    """
    prompts = (_PROBE_SHORT, _PROBE_LONG)
    alone = mx.concatenate([model(mx.array([ids]), cache=make_cache())[:, -1] for ids in prompts])
    apart = mx.abs(alone[0] - alone[1]).max()
    return bool((mx.abs(shared(prompts) - alone).max() <= _PROBE_TOLERANCE * apart).item())
