"""Which earlier positions a query attends to: the indexer of layers that have one.

A light attention of its own scores every position; the best `index_topk` are what this layer and the layers
after it look at, up to the next that has an indexer. Scores are computed in float32, as they were trained:
in 16 bits many are equal, and which of them are chosen would be chance.

Its keys lie in a plain KVCache, one half as keys, the other as values: stock mlx-lm fills the values with
zeros, which doubles what the indexer's cache takes.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import deepseek_v32
from mlx_lm.models.cache import KVCache

from mlxpool.worker.colibri.blocks import after, causal, spans

# Not MLX's default for a LayerNorm.
_KEY_NORM_EPS = 1e-6


class Indexer(deepseek_v32.Indexer):  # type: ignore[misc]  # mlx-lm has no types here
    """mlx-lm's, but for its norm, the type of its scores, its cache and their computation in blocks."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=_KEY_NORM_EPS)

    def __call__(self, x: mx.array, residual: mx.array, cache: KVCache | None) -> mx.array | None:
        """Positions [B, 1, L, index_topk] for each of the L queries, in no order; None where there are no
        more than it may choose. Those that lie behind a query are to be ignored.

        x: the layer's normed input [B, L, D]. residual: of the query's first projection [B, L, q_lora].
        """
        rows, length, _ = x.shape
        offset = 0 if cache is None else cache.offset
        keys = self.k_norm(self.wk(x)).reshape(rows, 1, length, self.head_dim)
        keys = self.rope(keys, offset=offset)
        if cache is not None:
            half = self.head_dim // 2
            keys = mx.concatenate(cache.update_and_fetch(keys[..., :half], keys[..., half:]), axis=-1)
        context = keys.shape[2]
        if context <= self.index_topk:
            return None
        queries = self.wq_b(residual).reshape(rows, length, self.n_heads, self.head_dim).swapaxes(1, 2)
        queries = self.rope(queries, offset=offset).astype(mx.float32)
        keys = keys.astype(mx.float32).swapaxes(-1, -2)
        weights = self.weights_proj(x).astype(mx.float32) * (self.n_heads**-0.5 * self.softmax_scale)
        weights = weights.swapaxes(-1, -2)[..., None]
        chosen: list[mx.array] = []
        for start, end in spans(length, rows * self.n_heads * context * mx.float32.size):
            block = after(queries[:, :, start:end], chosen)
            scores = mx.maximum(block @ keys, 0) * weights[:, :, start:end]
            if length > 1:
                # The heads one by one, as stock: a reduction over that axis is slow for many queries.
                total = sum(scores[:, head : head + 1] for head in range(self.n_heads))
                total = mx.where(causal(offset + start, offset + end, context, chosen), total, -mx.inf)
            else:
                total = scores.sum(axis=1, keepdims=True)
            best = mx.argpartition(total, kth=-self.index_topk, axis=-1)
            chosen.append(best[..., -self.index_topk :])
        return chosen[0] if len(chosen) == 1 else mx.concatenate(chosen, axis=2)
