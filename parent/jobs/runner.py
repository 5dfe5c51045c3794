"""Runs jobs, one at a time, first come first served; every change is a change of a row in the store.

Everything here belongs to the event loop. A job that is asked for while the same one waits or runs is that
one. Cancelling and the parent's own end are the same act: SIGTERM to the job's process group, SIGKILL after a
grace; a row has ended only when the process is gone, so nothing a job writes comes after its row's end.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared.config import Settings
from mlxpool.shared.errors import error
from mlxpool.shared.job_lines import Done, Failed, Line, Stage
from mlxpool.shared.text import cut

from .kinds import KINDS, Kind
from .process import JobProcess
from .store import Job, JobStore

logger = logging.getLogger("mlxpool.jobs")


# What a kind says of its config holds advice; what a client sent in it may be as long as a body.
MAX_PROBLEM_CHARS = 300


class Jobs:
    """The jobs of a running parent. Create inside the running loop; `close` before it ends."""

    def __init__(
        self,
        settings: Settings,
        run_folder: Path,
        *,
        env: Mapping[str, str] | None = None,
        kinds: Mapping[str, Kind] = KINDS,
    ) -> None:
        self.store = JobStore()
        self.subscribe = self.store.subscribe
        self._settings = settings
        self._run_folder = run_folder
        self._env = dict(os.environ if env is None else env)
        self._kinds = kinds
        self._waiting: deque[tuple[Job, list[str]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._running: tuple[str, JobProcess] | None = None
        self._cancelled: dict[str, str] = {}
        self._closed = False

    def submit(self, kind: str, config: object) -> Job:
        """The row of a new job, or of the same one where it is under way. Raises ApiError."""
        if kind not in self._kinds:
            raise error(
                "invalid_request",
                f"kind is {cut(kind)!r}; use one of: {', '.join(self._kinds)}",
                param="kind",
            )
        if self._closed:
            raise error("shutting_down", "the server is stopping; ask again when it is back")
        try:
            read = msgspec.convert(config, self._kinds[kind].config)
        except msgspec.ValidationError as problem:
            raise error(
                "invalid_request", f"config: {cut(str(problem), MAX_PROBLEM_CHARS)}", param="config"
            ) from None
        plain: dict[str, Any] = msgspec.to_builtins(read)
        known = self.store.find_active(kind, plain)
        # One that is being cancelled is no longer what is asked for.
        if known is not None and known.id not in self._cancelled:
            return known
        job = self.store.add(kind, plain)
        self._waiting.append((job, self._kinds[kind].argv(read, self._settings)))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return job

    def find(self, job_id: str) -> Job:
        """The row. Raises ApiError 404."""
        job = self.store.get(job_id)
        if job is None:
            raise error("not_found", f"no job {cut(job_id)!r} here; GET /api/jobs lists those there are")
        return job

    def cancel(self, job_id: str, why: str = "cancelled") -> Job:
        """End a job; one that has ended stays as it is. What it has staged is kept. Raises ApiError 404."""
        job = self.find(job_id)
        if job.status == "queued":
            self._waiting = deque(entry for entry in self._waiting if entry[0].id != job_id)
            self.store.end(job_id, "cancelled", message=why)
        elif self._running is not None and self._running[0] == job_id:
            self._cancelled[job_id] = why
            self._running[1].stop()
        return self.find(job_id)

    async def close(self) -> None:
        """End every job and wait until no process is left."""
        self._closed = True
        for job in self.store.rows():
            self.cancel(job.id, "the server stopped")
        if self._task is not None:
            await self._task

    async def _work(self) -> None:
        while self._waiting:
            job, argv = self._waiting.popleft()
            await self._run(job.id, argv)
        self._task = None

    async def _run(self, job_id: str, argv: list[str]) -> None:
        last: list[Done | Failed] = []

        def hear(line: Line) -> None:
            if isinstance(line, Stage):
                self.store.progress(job_id, line.progress, f"{line.name} {line.message}".strip())
            elif isinstance(line, Done | Failed):
                last.append(line)

        process = JobProcess(hear)
        self._running = job_id, process
        self.store.start(job_id)
        try:
            crashed = await process.run(argv, self._env, self._run_folder)
        except OSError as problem:
            crashed = f"it could not be started: {problem}"
        self._running = None
        outcome = last[-1] if last else None
        if isinstance(outcome, Done):
            # Also where it was to be cancelled: it was faster.
            self._cancelled.pop(job_id, None)
            self.store.end(job_id, "done", message="done", result=outcome.result)
        elif job_id in self._cancelled:
            self.store.end(job_id, "cancelled", message=self._cancelled.pop(job_id))
        else:
            ended = f"the job's process ended: {crashed or 'without a result'}"
            reason = outcome.error if isinstance(outcome, Failed) else ended
            logger.warning("job %s failed: %s", job_id, reason)
            self.store.end(job_id, "failed", message="failed", error=reason)
