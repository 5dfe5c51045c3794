"""Reads into slots: begun, waited for, given up, and counted.

The reading itself is the reader's, on threads of its own. Everything here runs on the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from typing import NamedTuple

from mlxpool.shared.colibri.layout import ExpertLayout
from mlxpool.shared.colibri.stats import Latency
from mlxpool.worker.colibri.contract import ExpertReader, ReadDone, Rows
from mlxpool.worker.colibri.slab import Slab, Staging

# How many of the latest waits and reads percentiles are of.
_KEPT = 4096


class Read(NamedTuple):
    """One expert on its way into a slot. staged: where it is read to, if not into the slot itself."""

    expert: int
    slab: Slab
    slot: int
    future: Future[ReadDone]
    staged: Rows | None


class Tally:
    """What the reads of a set of layers came to. Any thread may look. ended: loads, and reads that failed."""

    def __init__(self) -> None:
        self.ended = 0
        self.loads = 0
        self.read_bytes = 0
        self.wait_s = 0.0
        self.waits_s: deque[float] = deque(maxlen=_KEPT)
        self.services_s: deque[float] = deque(maxlen=_KEPT)
        self.waits = 0

    def waited(self, seconds: float) -> None:
        self.waits += 1
        self.wait_s += seconds
        self.waits_s.append(seconds)

    def done(self, read: ReadDone) -> None:
        self.loads += 1
        self.read_bytes += read.read_bytes
        self.services_s.append(read.service_s)


def latency(count: int, seconds: Iterable[float]) -> Latency:
    """seconds: the latest ones."""
    ordered = sorted(seconds)
    if not ordered:
        return Latency(count)
    last = len(ordered) - 1
    p50, p95, p99 = (1000 * ordered[round(share * last)] for share in (0.50, 0.95, 0.99))
    return Latency(count, p50, p95, p99)


class Reads:
    """Of a set of layers. staging: buffers for slabs that can't be read into."""

    def __init__(self, reader: ExpertReader, staging: Staging) -> None:
        self.tally = Tally()
        self._reader = reader
        self._staging = staging

    def begin(self, layout: ExpertLayout, expert: int, slab: Slab, slot: int, *, demand: bool = True) -> Read:
        """The slot must be nobody's to read: its slab settled, its table told."""
        staged = self._staging.take(layout) if slab.mode == "assign" else None
        rows = slab.rows(slot) if staged is None else staged
        return Read(
            expert, slab, slot, self._reader.submit(layout.layer, expert, rows, demand=demand), staged
        )

    def finish(self, layout: ExpertLayout, read: Read) -> None:
        """Wait until the slot holds the expert. Raises ReadFault."""
        try:
            self.tally.done(read.future.result())
            if read.staged is not None:
                read.slab.settle()
                read.slab.assign(read.slot, read.staged)
        finally:
            self.tally.ended += 1
            if read.staged is not None:
                self._staging.give(layout, read.staged)

    def hasten(self, read: Read) -> None:
        """A pass needs what is being read ahead of it."""
        self._reader.hasten(read.future)

    def drop(self, layout: ExpertLayout, read: Read) -> bool:
        """Give the read up if it hasn't begun; whether it is given up."""
        if not read.future.cancel():
            return False
        if read.staged is not None:
            self._staging.give(layout, read.staged)
        return True
