"""One expert read on the calling thread, at once or when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from mlxpool.worker.colibri.contract import ExpertSource, ReadDone, Rows
from mlxpool.worker.colibri.faults import ReadFault
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


class Awaited(Future[ReadDone]):
    """Has begun, and ends when somebody waits for it."""

    def __init__(self, read: Callable[[], int]) -> None:
        super().__init__()
        self._read = read
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> ReadDone:
        if not self.done():
            try:
                self.set_result(ReadDone(self._read(), 0.0))
            except ReadFault as fault:
                self.set_exception(fault)
        return super().result(timeout)
