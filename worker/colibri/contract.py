"""What the parts of the runtime ask of each other.

Threads: the engine's thread owns the stream, the slabs, the table of residents and every mx call. Reads run
on the reader's own threads, which touch numpy views of slots and nothing of MLX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, PartName, Projection
from mlxpool.worker.colibri.segments import Segment

# A slot's arrays as bytes: views of the part's whole extent in that slot, [size_bytes] of uint8, writable.
Rows = Mapping[tuple[Projection, PartName], npt.NDArray[np.uint8]]


class ReadDone(NamedTuple):
    """One expert's read. read_bytes: what was asked of the disk. service_s: from its first segment's start to
    its end, waiting for a turn not included."""

    read_bytes: int
    service_s: float


class Filling(Protocol):
    """One expert on its way into a slot's rows."""

    def read(self, segment: Segment) -> None:
        """Fetch one segment, on any thread, beside others of the same expert. Raises ReadFault."""
        ...

    def finish(self) -> None:
        """Make the rows of what was read; once, by one thread, after all segments. Raises ReadFault."""
        ...

    def release(self) -> None:
        """Give buffers back; once, at last, finished or not. No read may be under way."""
        ...


class ExpertSource(Protocol):
    """Experts on disk. Any thread may call it; it makes no mx call, and keeps nothing of an expert that was
    released."""

    artifact: Artifact

    def layout(self, layer: int) -> ExpertLayout: ...

    def segments(self, layer: int, expert: int, most_bytes: int) -> Sequence[Segment]:
        """The reads that an expert takes, of most_bytes each or little more. Raises ValueError where the
        layer has no such expert."""
        ...

    def begin(self, layer: int, expert: int, rows: Rows) -> Filling:
        """Until it is released, the rows hold nothing that may be used, and after a fault neither. Raises
        ReadFault."""
        ...

    def overwritten(self) -> str | None:
        """The first, by name, of the files that were written since they were opened. One that another was
        put in the place of is read as it was, and is none."""
        ...

    def close(self) -> None: ...


class ExpertReader(Protocol):
    """Segments of experts read at once, bounded in number and bytes, oldest expert first; demand before
    prefetch."""

    def submit(self, layer: int, expert: int, rows: Rows, *, demand: bool = True) -> Future[ReadDone]:
        """The future fails with ReadFault. One that has not begun can be cancelled. Nothing writes into the
        rows any more when it is done."""
        ...

    def hasten(self, read: Future[ReadDone]) -> None:
        """What was submitted ahead of its demand is demanded now. Harmless when it has ended."""
        ...

    def close(self) -> None:
        """Wait for reads under way, drop the others, close files."""
        ...
