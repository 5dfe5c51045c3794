"""What the scheduler is told (`Limits`), what it can do (`Effects`), and what it counts."""

from __future__ import annotations

from typing import Protocol

import msgspec

from mlxpool.shared.errors import ApiError

from .leases import Lease
from .state import ModelSpec, Ticket


class Effects(Protocol):
    """What the scheduler can do to the world. None of these may call back into the scheduler."""

    def now(self) -> float:
        """Monotonic seconds."""

    def start(self, worker: int, spec: ModelSpec, go: bool) -> None:
        """Start a process; with `go` it loads at once, else it imports and waits for `go`."""

    def start_spare(self, worker: int) -> None:
        """Start a process that imports and waits, for no model yet."""

    def adopt(self, worker: int, spec: ModelSpec) -> None:
        """The spare becomes this model's worker; `go` follows when there is room."""

    def go(self, worker: int, spec: ModelSpec) -> None:
        """Let a started worker touch weights."""

    def drain(self, worker: int) -> None:
        """Ask the worker to drain; `on_drained` follows, also on time-out."""

    def stop(self, worker: int) -> None:
        """End the process: SIGTERM, then SIGKILL; `on_exit` follows."""

    def kill(self, worker: int) -> None:
        """SIGKILL its process group now; `on_exit` follows."""

    def grant(self, ticket: Ticket) -> None:
        """The ticket's model is ready: its request may be relayed to `ticket.worker`."""

    def reject(self, ticket: Ticket, err: ApiError) -> None:
        """A queued ticket won't be served."""

    def revoke(self, ticket: Ticket, err: ApiError) -> None:
        """A granted ticket's request must end with this error."""

    def lease(self, worker: int) -> None:
        """Ask the worker to finish its rows and compute nothing; `on_leased` follows, `on_unleased` where it
        can't or no longer does. Over with `unlease`, and with drain, stop and kill."""

    def unlease(self, worker: int) -> None:
        """Let the worker compute again."""

    def lend(self, lease: Lease) -> None:
        """The GPU is this holder's alone until `on_release`."""

    def deny(self, lease: Lease, err: ApiError) -> None:
        """A lease that waits won't be held."""

    def log(self, event: str, model: str, detail: str = "") -> None:
        """Something a person may want to know happened."""


class Limits(msgspec.Struct, frozen=True):
    """The settings of [pool] that the scheduler acts on. Bytes and seconds. spare_bytes: 0 = no spare."""

    budget_bytes: int
    spare_bytes: int = 0
    queue_timeout_s: float = 600.0
    load_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0


class Counters(msgspec.Struct):
    """Since the parent's start."""

    loads: int = 0
    evictions: int = 0
    crashes: int = 0
