"""Queries in blocks, so that scores of a long chunk behind a long context stay small."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

# What one array of scores may take. A chunk of 2,048 tokens behind 128k would need 32 GB for 64 heads in 16
# bits; a quarter of a gigabyte is work enough for any device and little beside a layer's slots. Three such
# arrays live at once: scores, mask and weights.
SCORES_BYTES = 256 * 1024 * 1024


def spans(length: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, end) of blocks of queries; row_bytes: what one query's scores take."""
    step = max(1, SCORES_BYTES // row_bytes)
    for start in range(0, length, step):
        yield start, min(start + step, length)


def causal(start: int, end: int, context: int) -> mx.array:
    """Which of `context` positions the queries at [start, end) may see: bool [end - start, context]."""
    return mx.arange(start, end)[:, None] >= mx.arange(context)[None]
