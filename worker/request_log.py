"""What the worker's log and the trace say of a request."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mlxpool.shared.colibri.stats import ExpertSummary
from mlxpool.shared.trace import Outcome, TraceFile
from mlxpool.worker.engine.row import Row
from mlxpool.worker.request.plan import Plan
from mlxpool.worker.text.events import Event, Failure, Usage


class RequestLog:
    """Two lines on stderr per request: what it asks, how it ended. And one in the trace, if there is one."""

    def __init__(self, request_id: str, model: str, trace: TraceFile | None) -> None:
        self.outcome = "ok"
        self.rows: Sequence[Row] = ()
        self._id = request_id
        self._model = model
        self._trace = trace
        self._prepared_s = 0.0
        self._began_s = time.perf_counter()
        self._first_s: float | None = None
        self._tokens: int | None = None

    def begin(self, plans: Sequence[Plan]) -> None:
        self._prepared_s = time.perf_counter()
        first = plans[0]
        times = f", {len(plans)} times" if len(plans) > 1 else ""
        log_line(
            f"request {self._id}: {len(first.ids)} prompt tokens, at most {first.max_tokens} more{times}"
        )

    def note(self, said: Sequence[tuple[int, Event]]) -> None:
        """Remember what the last line will say."""
        if said and self._first_s is None:
            self._first_s = time.perf_counter() - self._began_s
        for _, event in said:
            if isinstance(event, Usage):
                self._tokens = (self._tokens or 0) + event.completion_tokens
            elif isinstance(event, Failure):
                self.outcome = event.error.code

    def end(self) -> None:
        tokens = "" if self._tokens is None else f", {self._tokens} tokens"
        first = "" if self._first_s is None else f", first after {self._first_s:.3f} s"
        ended_s = time.perf_counter()
        use = self._experts()
        log_line(
            f"request {self._id}: {self.outcome}{tokens}{first}, {ended_s - self._began_s:.3f} s{_told(use)}"
        )
        if self._trace is None:
            return
        outcome: Outcome = "error"
        if self.outcome in ("ok", "cancelled"):
            outcome = "ok" if self.outcome == "ok" else "cancelled"
        phases = {
            "prepare": self._prepared_s,
            "queue": self.rows[0].admitted_s if self.rows else 0.0,
            "prefill": self.rows[0].prefilled_s if self.rows else 0.0,
            "first_token": self._began_s + self._first_s if self._first_s is not None else 0.0,
            "last_write": ended_s,
        }
        reached = {name: round((at - self._began_s) * 1000, 3) for name, at in phases.items() if at}
        self._trace.write(self._id, "worker", self._model, outcome, reached, use)

    def _experts(self) -> ExpertSummary | None:
        """What its rows needed of experts that are streamed."""
        turns = [row.turn for row in self.rows if row.turn is not None]
        if not turns:
            return None
        return ExpertSummary(
            hits=sum(turn.hits for turn in turns),
            misses=sum(turn.misses for turn in turns),
            read_bytes=sum(turn.read_bytes for turn in turns),
            wait_s=round(sum(turn.wait_s for turn in turns), 3),
        )


def _told(use: ExpertSummary | None) -> str:
    """For the line's end."""
    if use is None:
        return ""
    needed = use.hits + use.misses
    if not needed:
        # Nothing was computed, or all experts are held: then nobody counts, for that would be a wait.
        return ", no expert was waited for"
    return f", {use.hits} of {needed} experts held, {use.read_bytes} bytes read, {use.wait_s:.3f} s waited"


def open_trace(path: str | None) -> TraceFile | None:
    """The trace file; one that can't be opened costs the trace alone."""
    if path is None:
        return None
    try:
        return TraceFile(Path(path))
    except OSError as err:
        log_line(f"no trace: {path} can't be written: {err}")
        return None


def log_line(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
