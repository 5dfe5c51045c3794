"""One expert read on the calling thread."""

from __future__ import annotations

from mlxpool.worker.colibri.contract import ExpertSource, Rows
from mlxpool.worker.colibri.segments import SEGMENT_BYTES


def fill(source: ExpertSource, layer: int, expert: int, rows: Rows) -> int:
    """Returns the bytes read. Raises as the source's steps do."""
    filling = source.begin(layer, expert, rows)
    try:
        for segment in source.segments(layer, expert, SEGMENT_BYTES):
            filling.read(segment)
        filling.finish()
    finally:
        filling.release()
    return source.layout(layer).record_bytes
