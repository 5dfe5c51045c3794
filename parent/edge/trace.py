"""When each thing happened to a request, and the line a trace has of it.

With `[server] trace = true` the parent writes one JSON line per request to home/logs/trace.jsonl, and each
worker its own for the same request id: together they say where the time went.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxpool.shared.trace import Outcome, TraceFile


@dataclass
class RequestTimes:
    """Monotonic seconds; 0.0 where it did not come to that. outcome: cancelled until proven otherwise."""

    begun: float = 0.0
    parsed: float = 0.0
    granted: float = 0.0
    first_byte: float = 0.0
    ended: float = 0.0
    outcome: Outcome = "cancelled"

    def durations(self) -> tuple[float | None, float | None, float]:
        """Seconds from the beginning to: its model was ready, its first byte, its end."""
        return (
            self.granted - self.begun if self.granted else None,
            self.first_byte - self.begun if self.first_byte else None,
            self.ended - self.begun,
        )

    def phases_ms(self) -> dict[str, float]:
        """Milliseconds from the beginning to the end of each phase that was reached."""
        phases = {
            "parse": self.parsed,
            "queue": self.granted,
            "first_write": self.first_byte,
            "last_write": self.ended,
        }
        return {name: round((at - self.begun) * 1000, 3) for name, at in phases.items() if at}


class Trace:
    """The parent's lines, while it is switched on."""

    def __init__(self) -> None:
        self._file: TraceFile | None = None

    def switch(self, file: TraceFile | None) -> None:
        """Write to this file from now on, or not at all."""
        if self._file is not None:
            self._file.close()
        self._file = file

    def write(self, request: str, model: str, times: RequestTimes) -> None:
        """One request's line."""
        if self._file is not None:
            self._file.write(request, "parent", model, times.outcome, times.phases_ms())
