"""Whether one more row fits into the KV pool. Pure.

A row is counted with what it may grow to: its prompt and its clamped max_tokens. A request that set no
limit could grow to the whole context, and counting it so would serve one at a time; it is counted in
blocks instead, one block ahead of what it holds; when rows have grown out of the pool together, the youngest
give up their place and wait again. Sliding layers are counted up to their window. Admission is first come
first served: a row that has to wait makes those behind it wait, and a row that is alone always runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

# How far ahead of itself a row without a limit is counted: a long answer, in tokens.
GROWTH_BLOCK_TOKENS = 1024

# Caches grow in steps of this many positions.
_ALLOCATION_STEP_TOKENS = 256


class LayerKv(msgspec.Struct, frozen=True):
    """One layer's cache, or several alike. window_tokens: positions kept at most, None for all."""

    bytes_per_token: int
    window_tokens: int | None = None


class KvCost(msgspec.Struct, frozen=True):
    """What a row's caches take. fixed_bytes: state that doesn't grow with the row (SSM, convolutions)."""

    layers: tuple[LayerKv, ...]
    fixed_bytes: int = 0

    def row_bytes(self, tokens: int) -> int:
        """Bytes of one row's caches at a length of `tokens`."""
        steps = -(-tokens // _ALLOCATION_STEP_TOKENS) * _ALLOCATION_STEP_TOKENS
        return self.fixed_bytes + sum(
            layer.bytes_per_token
            * (steps if layer.window_tokens is None else min(steps, layer.window_tokens))
            for layer in self.layers
        )


class Projection(msgspec.Struct, frozen=True):
    """A row as admission sees it, in tokens."""

    prompt: int
    generated: int
    max_tokens: int
    limited: bool

    def tokens(self) -> int:
        """The length this row is counted with."""
        if self.limited:
            return self.prompt + self.max_tokens
        ahead = (self.generated // GROWTH_BLOCK_TOKENS + 1) * GROWTH_BLOCK_TOKENS
        return self.prompt + min(self.max_tokens, ahead)


def holds(rows: Sequence[Projection], cost: KvCost, pool_bytes: int) -> int:
    """How many of the rows, oldest first, the pool holds; the oldest it always does."""
    used = 0
    for place, row in enumerate(rows):
        used += cost.row_bytes(row.tokens())
        if place and used > pool_bytes:
            return place
    return len(rows)
