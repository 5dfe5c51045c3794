"""How well a model predicts ids: windows over them (pure), and the loss of one window.

Every id but the first is predicted exactly once, from at most `context` before it. A window goes through the
model in chunks with a cache, as a prompt does, so that what is alive at once does not grow with the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

from mlxpool.worker.load import backend

# As wide as prefill chunks are at most: wider gained nothing (facts of shared/memory.py).
CHUNK_TOKENS = {"cpu": 256, "metal": 1024, "cuda": 2048}


class Window(NamedTuple):
    """ids[begin:end - 1] are looked at; ids[first:end] are predicted."""

    begin: int
    first: int
    end: int


def windows(count: int, first: int, context: int, stride: int) -> Iterator[Window]:
    """Windows that predict ids[first:count], `stride` at a time. first: 1 or more."""
    at = max(1, first)
    while at < count:
        end = min(at + stride, count)
        yield Window(max(0, end - 1 - context), at, end)
        at = end


def loss_of(model: Any, ids: list[int], window: Window) -> float:
    """Summed cross-entropy (nats) of the window's predictions."""
    inputs, targets = ids[window.begin : window.end - 1], ids[window.begin + 1 : window.end]
    skipped = window.first - window.begin - 1
    cache = make_prompt_cache(model)
    width = CHUNK_TOKENS[backend()]
    total = mx.array(0.0)
    for begin in range(0, len(inputs), width):
        end = min(begin + width, len(inputs))
        logits = model(mx.array([inputs[begin:end]]), cache=cache)
        of_these = max(skipped - begin, 0)
        if of_these < end - begin:
            rows = logits[0, of_these:].astype(mx.float32)
            total = total + nn.losses.cross_entropy(
                rows, mx.array(targets[begin + of_these : end]), reduction="sum"
            )
        mx.eval(total, [layer.state for layer in cache])
    summed: Any = total.item()
    return float(summed)
