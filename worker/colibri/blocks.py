"""Queries and heads in blocks, so that a long chunk behind a long context makes nothing that is large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

# What one array of scores may take. A chunk of 2,048 tokens behind 128k would need 32 GB for 64 heads in 16
# bits; a quarter of a gigabyte is work enough for any device and little beside a layer's slots. Three such
# arrays live at once: scores, mask and weights.
SCORES_BYTES = 256 * 1024 * 1024
# What the keys and values of some heads may take, of a whole context: all 64 heads' of GLM-5.2 are 16 GB
# behind 128k in float32.
EXPANDED_BYTES = 256 * 1024 * 1024


def spans(length: int, row_bytes: int, most_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """(start, end) of blocks of queries; row_bytes: what one query's scores take. Or of anything else of
    which a block may take most_bytes."""
    step = max(1, (SCORES_BYTES if most_bytes is None else most_bytes) // row_bytes)
    for start in range(0, length, step):
        yield start, min(start + step, length)


def after(held: mx.array, made: Sequence[mx.array]) -> mx.array:
    """The same array, once the last of `made` is there. MLX computes a graph breadth first: blocks that don't
    wait for each other are all alive at once."""
    if not made:
        return held
    waits: mx.array = mx.depends(held, made[-1])
    return waits


def causal(start: int, end: int, context: int, made: Sequence[mx.array] = ()) -> mx.array:
    """Which of `context` positions the queries at [start, end) may see: bool [end - start, context]. made: as
    of `after`."""
    return after(mx.arange(start, end), made)[:, None] >= mx.arange(context)[None]
