"""The rows of all jobs, in memory: what was asked, how far it is, how it ended.

The store owns its rows and is used by one thread, the parent's event loop. A row is never changed, only
replaced, so whoever was handed one may keep it. Subscribers hear of every replacement, in order; the file
that rows outlive the server in is one of them (keeping.py). Ended rows beyond a limit are forgotten, oldest
first; rows that still run never are.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

Status = Literal["queued", "running", "done", "failed", "cancelled", "interrupted"]
End = Literal["done", "failed", "cancelled", "interrupted"]
ENDED: frozenset[Status] = frozenset({"done", "failed", "cancelled", "interrupted"})

# A page shows the recent ones, a person looks for one of last week's; their logs are what costs.
MAX_ENDED_ROWS = 200


class Job(msgspec.Struct, frozen=True):
    """One job. progress: 0 to 1. created, started, ended: unix seconds. error: set where it failed or was
    interrupted."""

    id: str
    kind: str
    config: dict[str, Any]
    status: Status
    progress: float
    message: str
    result: dict[str, Any] | None
    error: str | None
    created: float
    started: float | None
    ended: float | None

    @property
    def active(self) -> bool:
        """Whether it is still to end."""
        return self.status not in ENDED


Subscriber = Callable[[Job], None]


class JobStore:
    """Rows by id, in the order of their creation."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now = now
        # Called with the id of a row that was forgotten.
        self.forgotten: Callable[[str], None] = lambda _: None
        self._rows: dict[str, Job] = {}
        self._subscribers: list[Subscriber] = []

    def load(self, rows: Iterable[Job]) -> None:
        """Rows of before, oldest first. Nobody is told."""
        self._rows = {row.id: row for row in rows}

    def rows(self) -> list[Job]:
        """Every row, the newest first."""
        return list(reversed(self._rows.values()))

    def get(self, job_id: str) -> Job | None:
        return self._rows.get(job_id)

    def find_active(self, kind: str, config: dict[str, Any]) -> Job | None:
        """The newest job of this kind and configuration that has not ended."""
        same = (job for job in self.rows() if (job.kind, job.config) == (kind, config))
        return next((job for job in same if job.active), None)

    def add(self, kind: str, config: dict[str, Any]) -> Job:
        """A new queued row."""
        job_id = f"job_{secrets.token_hex(8)}"
        job = Job(job_id, kind, config, "queued", 0.0, "waiting", None, None, self.now(), None, None)
        self._put(job)
        self.forget()
        return job

    def forget(self) -> None:
        """Ended rows that are too many."""
        ended = [row.id for row in self._rows.values() if not row.active]
        for old in ended[: max(0, len(ended) - MAX_ENDED_ROWS)]:
            del self._rows[old]
            self.forgotten(old)

    def start(self, job_id: str) -> None:
        """It runs from now on."""
        self._replace(job_id, status="running", message="starting", started=self.now())

    def progress(self, job_id: str, progress: float, message: str) -> None:
        """How far it is."""
        self._replace(job_id, progress=min(1.0, max(0.0, progress)), message=message)

    def end(
        self,
        job_id: str,
        status: End,
        *,
        message: str,
        result: dict[str, Any] | None = None,
        error: str | None = None,
    ) -> None:
        """It has ended; a row ends once."""
        if self._rows[job_id].active:
            changes = {"progress": 1.0} if status == "done" else {}
            self._replace(
                job_id,
                status=status,
                message=message,
                result=result,
                error=error,
                ended=self.now(),
                **changes,
            )

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every new or changed row; the returned function ends that."""
        self._subscribers.append(subscriber)
        return lambda: self._subscribers.remove(subscriber)

    def _replace(self, job_id: str, **changes: Any) -> None:
        self._put(msgspec.structs.replace(self._rows[job_id], **changes))

    def _put(self, job: Job) -> None:
        self._rows[job.id] = job
        for subscriber in list(self._subscribers):
            subscriber(job)
