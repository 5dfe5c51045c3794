"""Attention on the CPU backend, with a faster softmax than MLX's own.

MLX's CPU kernels take 14 ns for one exponential (its matmuls a tenth of that for a score), so behind a long
context nearly all of a prefill chunk is softmax: 59 of 94 ms a layer for 64 tokens behind 6,000. numpy's take
under one. The scores are made and used by MLX's matmuls as before; in between numpy turns them into weights
in place, in the array's own memory, which costs one evaluation a layer. Few scores, other types than float32,
sinks and additive masks go to MLX as ever.

Engine thread only, like every MLX call; `install` once, before the first model is called.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

# Below this many scores an evaluation costs what the exponentials save: a step of eight rows behind 600
# tokens takes as long either way, behind 1,500 two thirds.
_MIN_SCORES = 64 * 1024

_LOWEST = np.finfo(np.float32).min

_plain = mx.fast.scaled_dot_product_attention


def install() -> None:
    """Make it what models call. Harmless a second time."""
    mx.fast.scaled_dot_product_attention = attention


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **more: Any,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`: q [B, H, L, D], k [B, G, T, D], v [B, G, T, E], H a multiple of
    G, to [B, H, L, E]. mask: None, "causal", bool or additive, broadcast to [B, H, L, T]."""
    batch, heads, length, width = q.shape
    groups, context = k.shape[1], k.shape[2]
    additive = isinstance(mask, mx.array) and mask.dtype != mx.bool_
    small = batch * heads * length * context < _MIN_SCORES
    if small or additive or sinks is not None or more or not _are_float32(q, k, v):
        return _plain(q, k, v, scale=scale, mask=mask, sinks=sinks, **more)
    rows = (q * scale).reshape(batch, groups, heads // groups * length, width)
    scores = rows @ k.swapaxes(-1, -2)
    mx.eval(scores, mask) if isinstance(mask, mx.array) else mx.eval(scores)
    held = np.array(scores, copy=False).reshape(batch, heads, length, context)
    if isinstance(mask, mx.array):
        allowed = np.broadcast_to(np.array(mask, copy=False), held.shape)
        np.copyto(held, _LOWEST, where=~allowed)
    elif mask == "causal":
        # Only the last `length` columns hold anything that a row must not see.
        later = ~np.tri(length, dtype=bool)
        np.copyto(held[..., context - length :], _LOWEST, where=later)
    held -= held.max(axis=-1, keepdims=True)
    np.exp(held, out=held)
    totals = mx.array(held.sum(axis=-1, keepdims=True))
    return (scores @ v).reshape(batch, heads, length, v.shape[-1]) / totals


def _are_float32(*arrays: mx.array) -> bool:
    return all(array.dtype == mx.float32 for array in arrays)
