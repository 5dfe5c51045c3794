"""What the parts of the runtime ask of each other.

Threads: the engine's thread owns the stream, the slabs, the table of residents and every mx call. Reads run
on the reader's own threads, which touch numpy views of slots and nothing of MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mlxpool.shared.colibri.layout import Artifact, ExpertLayout, PartName, Projection

# A slot's arrays as bytes: views of the part's whole extent in that slot, [size_bytes] of uint8, writable.
Rows = Mapping[tuple[Projection, PartName], npt.NDArray[np.uint8]]


class ReadDone(NamedTuple):
    """One expert's read. read_bytes: what was asked of the disk. service_s: from its start on a thread to its
    end, waiting for a turn not included."""

    read_bytes: int
    service_s: float


class ExpertSource(Protocol):
    """Experts on disk. `fill` is called by many threads at once; it makes no mx call and keeps nothing."""

    @property
    def artifact(self) -> Artifact: ...

    def layout(self, layer: int) -> ExpertLayout: ...

    def fill(self, layer: int, expert: int, rows: Rows) -> int:
        """Read one expert into a slot's rows; returns the bytes read. Raises ReadFault; the rows then hold
        nothing that may be used."""
        ...

    def overwritten(self) -> str | None:
        """The first, by name, of the files that were written since they were opened. One that another was
        put in the place of is read as it was, and is none."""
        ...

    def close(self) -> None: ...


class ExpertReader(Protocol):
    """Reads at once, bounded in number and bytes, oldest first; demand before prefetch."""

    def submit(self, layer: int, expert: int, rows: Rows, *, demand: bool = True) -> Future[ReadDone]:
        """The future fails with ReadFault. One that has not begun can be cancelled."""
        ...

    def close(self) -> None:
        """Wait for reads under way, drop the others, close files."""
        ...
