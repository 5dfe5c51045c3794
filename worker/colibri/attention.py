"""GLM-5.2's attention: a latent of keys and values per position, of which each query sees those that an
indexer chose.

Few queries (decode, and the verification of drafts) are absorbed: they are projected into the latent's own
space, and nothing is made for a whole context. Many queries (prefill) meet keys and values that are made of
the latents, as many heads at a time as stay small. Both say the same up to rounding. Decode and prefill are
computed by the very operations of mlx-lm's class; with an indexer on every layer a float32 model equals it
bit for bit.

Rows of one batch are of one length, as caches without padding hold them.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import deepseek_v32
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import CacheList

from mlxpool.worker.colibri import blocks
from mlxpool.worker.colibri.blocks import after, causal, spans
from mlxpool.worker.colibri.indexer import Indexer

# Up to here queries are absorbed: a token and the drafts behind it. Expanding keys and values costs as much
# for one query as for a thousand.
ABSORBED_QUERIES = 8


class Attention(deepseek_v32.DeepseekV32Attention):  # type: ignore[misc]  # mlx-lm has no types here
    """full: whether it has an indexer. Without one it looks where it is told, or everywhere."""

    def __init__(self, args: Any, full: bool) -> None:
        super().__init__(args)
        if full:
            self.indexer = Indexer(args)
        else:
            del self.indexer

    def __call__(
        self, x: mx.array, cache: CacheList | None, chosen: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """What it adds to x [B, L, D], and the positions that the next layers look at.

        chosen: what the last indexer chose, [B, 1, L, index_topk], None for all positions.
        """
        rows, length, _ = x.shape
        residual = self.q_a_layernorm(self.q_a_proj(x))
        queries = self.q_b_proj(residual)
        queries = queries.reshape(rows, length, self.num_heads, self.q_head_dim).transpose(0, 2, 1, 3)
        q_nope, q_rope = mx.split(queries, [self.qk_nope_head_dim], axis=-1)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        latent = mx.expand_dims(self.kv_a_layernorm(latent), axis=1)
        k_rope = k_rope.reshape(rows, length, 1, self.qk_rope_head_dim).transpose(0, 2, 1, 3)
        offset = 0 if cache is None else cache[0].offset
        q_rope, k_rope = self.rope(q_rope, offset), self.rope(k_rope, offset)
        if cache is not None:
            latent, k_rope = cache[0].update_and_fetch(latent, k_rope)
        if "indexer" in self:
            chosen = self.indexer(x, residual, None if cache is None else cache[1])
            if cache is not None:
                # Short contexts never use the indexer's keys; without this their graph would only grow.
                cache[0].keys = mx.depends(cache[0].keys, (cache[1].keys, cache[1].values))
        q_rope = q_rope * self.scale
        if length <= ABSORBED_QUERIES:
            out = self._absorbed(q_nope, q_rope, latent, k_rope, chosen, offset)
        else:
            out = self._expanded(q_nope, q_rope, latent, k_rope, chosen, offset)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, length, -1)), chosen

    def _absorbed(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        k_rope: mx.array,
        chosen: mx.array | None,
        offset: int,
    ) -> mx.array:
        """[B, H, L, v] of queries [B, H, L, ·] and latents [B, 1, T, ·]."""
        rows, heads, length, _ = q_nope.shape
        q_nope = self.embed_q(q_nope)
        allowed = None
        if chosen is None:
            if length > 1:
                allowed = causal(offset, offset + length, latent.shape[2])
        else:
            # Each query with the positions it chose, as a row of a batch.
            latent, k_rope = (_taken(each, chosen) for each in (latent, k_rope))
            q_nope, q_rope = (_one_by_one(each) for each in (q_nope, q_rope))
            if length > 1:
                own = mx.arange(offset, offset + length)[None, None, :, None]
                allowed = (chosen <= own).reshape(rows * length, 1, 1, -1)
        scores = _masked(q_rope @ k_rope.swapaxes(-1, -2), allowed)
        out = scaled_dot_product_attention(q_nope, latent, latent, cache=None, scale=self.scale, mask=scores)
        if chosen is not None:
            out = out.reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)
        values: mx.array = self.unembed_out(out)
        return values

    def _expanded(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        latent: mx.array,
        k_rope: mx.array,
        chosen: mx.array | None,
        offset: int,
    ) -> mx.array:
        """As `_absorbed`, with keys and values of every position and of some heads at a time in between."""
        rows, heads, _, _ = q_nope.shape
        # A packed product on the CPU has the latents copied for every head.
        widths = 2 * self.kv_lora_rank + self.qk_nope_head_dim + self.v_head_dim
        head_bytes = rows * latent.shape[2] * widths * latent.dtype.size
        k_rope = k_rope.swapaxes(-1, -2)
        parts: list[mx.array] = []
        for first, last in spans(heads, head_bytes, blocks.EXPANDED_BYTES):
            is_all = last - first == heads
            to_keys, to_values = (
                each if is_all else _of_heads(each, first, last) for each in (self.embed_q, self.unembed_out)
            )
            latents = after(latent, parts)
            keys, values = to_keys(latents, transpose=False), to_values(latents)
            nope, turned = (each if is_all else each[:, first:last] for each in (q_nope, q_rope))
            parts.append(self._attended(nope, turned, keys, values, k_rope, chosen, offset))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def _attended(
        self,
        q_nope: mx.array,
        q_rope: mx.array,
        keys: mx.array,
        values: mx.array,
        k_rope: mx.array,
        chosen: mx.array | None,
        offset: int,
    ) -> mx.array:
        """[B, h, L, v] of these heads, some queries at a time. k_rope: [B, 1, rope, T]."""
        rows, heads, length, _ = q_nope.shape
        context = keys.shape[2]
        parts: list[mx.array] = []
        for start, end in spans(length, rows * heads * context * q_nope.dtype.size):
            allowed = causal(offset + start, offset + end, context, parts)
            if chosen is not None:
                block = after(chosen[:, :, start:end], parts)
                sparse = mx.zeros((*block.shape[:-1], context), dtype=mx.bool_)
                allowed = mx.put_along_axis(sparse, block, mx.array(True), axis=-1) & allowed
            nope, turned = (after(each[:, :, start:end], parts) for each in (q_nope, q_rope))
            scores = _masked(turned @ k_rope, allowed)
            parts.append(
                scaled_dot_product_attention(nope, keys, values, cache=None, scale=self.scale, mask=scores)
            )
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _of_heads(module: nn.Module, first: int, last: int) -> nn.Module:
    """A module of a matrix per head, with those of some heads."""
    part = copy.copy(module)
    for name, held in module.items():
        if isinstance(held, mx.array):
            part[name] = held[first:last]
    return part


def _masked(scores: mx.array, allowed: mx.array | None) -> mx.array:
    if allowed is None:
        return scores
    return mx.where(allowed, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def _taken(held: mx.array, chosen: mx.array) -> mx.array:
    """[B, 1, T, W] and [B, 1, L, K] to [B * L, 1, K, W]."""
    rows, _, length, count = chosen.shape
    width = held.shape[-1]
    index = mx.broadcast_to(chosen.reshape(rows, 1, length * count, 1), (rows, 1, length * count, width))
    return mx.take_along_axis(held, index, axis=2).reshape(rows * length, 1, count, width)


def _one_by_one(queries: mx.array) -> mx.array:
    """[B, H, L, W] to [B * L, H, 1, W]."""
    rows, heads, length, width = queries.shape
    return queries.transpose(0, 2, 1, 3).reshape(rows * length, heads, 1, width)
