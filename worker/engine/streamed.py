"""What the engine does for a model whose experts are read from disk as they are needed.

A pass takes seconds there, a wide one a minute. So it is given up in the middle when nobody waits for it any
more; what it did for a request is told with the request; and between two passes slots are given back where
the machine lacks memory. Weights that are overwritten while they are served end every request from then on,
before anything that was computed of them is told or kept. Engine thread only, but for `last_turn` and
`pressure`, which any thread may read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import psutil

from mlxpool.shared.colibri.stats import (
    ColibriStats,
    ExpertSummary,
    PressureStats,
    TurnStats,
    summarise,
)
from mlxpool.shared.errors import error
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.pressure import LOOK_S, Pressure, floor_bytes
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.terms import Stream


def available_bytes() -> int:
    """Memory that the machine could give to a program now."""
    return int(psutil.virtual_memory().available)


class Streamed:
    """Of one model. stopping: whether the engine is about to end. available: see available_bytes."""

    def __init__(
        self,
        stream: Stream,
        stopping: Callable[[], bool],
        available: Callable[[], int] = available_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._stopping = stopping
        self._available = available
        self._clock = clock
        floor = floor_bytes(psutil.virtual_memory().total)
        self._pressure = Pressure(stream.slots, stream.slot_bytes, floor)
        self._looked_s = clock()
        self._rows: Sequence[Row] = ()
        self._begun: dict[Row, ExpertSummary] = {}
        self._turn_over = False
        self.last_turn: TurnStats | None = None
        self.pressure = PressureStats()
        stream.stop = self._abandoned

    @property
    def progress(self) -> int:
        """Grows with each layer and group of experts, so within a pass too."""
        return self._stream.progress

    def _abandoned(self) -> bool:
        """Whether nobody waits for the pass that runs."""
        return self._stopping() or (bool(self._rows) and all(row.cancelled for row in self._rows))

    def passes(self, rows: Sequence[Row]) -> None:
        """The passes that follow are for these rows."""
        self._rows = rows

    def admitted(self, row: Row) -> None:
        """What is read from now on may be for it."""
        if row not in self._begun:
            self._begun[row] = summarise(self._stream.stats())

    def ended(self, row: Row) -> None:
        """A row is over, however it came to that."""
        begun = self._begun.pop(row, None)
        self._turn_over = True
        if begun is not None:
            now = summarise(self._stream.stats())
            row.turn = self.last_turn = turn(row, begun, now, time.perf_counter())

    @property
    def intact(self) -> bool:
        """Whether what passes have computed so far comes of the weights that were loaded."""
        return self._stream.overwritten() is None

    def check(self) -> None:
        """Raises ApiError where it may not."""
        if file := self._stream.overwritten():
            raise error("internal_error", _overwritten(file))

    def explained(self, err: Exception) -> Exception:
        """A fault, with what it comes of where that is known."""
        file = self._stream.overwritten() if isinstance(err, ReadFault) else None
        if file is None or not isinstance(err, ReadFault):
            return err
        return ReadFault(err.layer, err.expert, err.file, f"{err.reason}; {_overwritten(file)}")

    def stats(self) -> ColibriStats:
        """What the stream has counted, the last request and slots that were given back."""
        return msgspec.structs.replace(self._stream.stats(), last_turn=self.last_turn, pressure=self.pressure)

    def between_passes(self, held: bool) -> None:
        """What may be done now and not within a pass. held: the GPU is somebody else's, who needs its memory:
        none is taken again."""
        if self._turn_over:
            self._turn_over = False
            self._stream.turn_ended()
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        slots = self._stream.slots
        wanted = self._pressure.wanted(slots, self._available(), now_s)
        if wanted == slots or (held and wanted > slots):
            return
        self._stream.resize(wanted)
        given, taken = max(0, slots - wanted), max(0, wanted - slots)
        told = self.pressure
        self.pressure = PressureStats(told.given_back + given, told.taken_again + taken)


def _overwritten(file: str) -> str:
    return f"{file} was overwritten while this model is served from it; reload the model"


def turn(row: Row, begun: ExpertSummary, now: ExpertSummary, now_s: float) -> TurnStats:
    """A request that ends now (perf_counter), by what the stream had counted when it was let in."""
    hits, misses = now.hits - begun.hits, now.misses - begun.misses
    decode_s = now_s - row.first_s
    return TurnStats(
        prompt_tokens=len(row.plan.ids),
        cached_tokens=row.cached_tokens or 0,
        tokens=row.emitted,
        ttft_s=row.first_s - row.admitted_s if row.first_s else 0.0,
        prefill_s=row.prefilled_s - row.admitted_s if row.prefilled_s else 0.0,
        # The first token is the prefill's.
        tokens_per_s=(row.emitted - 1) / decode_s if row.first_s and decode_s > 0 else 0.0,
        hits=hits,
        misses=misses,
        hit_rate=hits / (hits + misses) if hits + misses else 0.0,
        read_bytes=now.read_bytes - begun.read_bytes,
        wait_s=now.wait_s - begun.wait_s,
        drafted=row.drafted,
        accepted=row.accepted,
    )
