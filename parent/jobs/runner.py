"""Runs jobs; every change is a change of a row in the store and, mostly, an event in the job's log.

Jobs wait in lines, first come first served: all that need the GPU in one, every other kind in its own. A GPU
job is queued until the pool has lent it the GPU, and gives it back when its process is gone; then its row
ends, so nothing a job does comes after its row's end. A job that is asked for while the same one waits or
runs is that one. Cancelling and the server's own end are the same act: a job that waits gives up its place,
one that runs gets SIGTERM to its process group, and SIGKILL after a grace.

Everything here belongs to the event loop; what kinds have to say is asked on threads, for they read files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.parent.database import Database
from mlxpool.parent.library import Library
from mlxpool.shared.backend import Backend, worker_environment
from mlxpool.shared.config import Settings
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.job_lines import Done, Failed, Line, Stage
from mlxpool.shared.text import cut

from .boot import clean_stages, sweep_logs
from .gpu import Gpu
from .keeping import JobKeeper
from .kinds import KINDS
from .kinds.kind import Here, Kind, Needs
from .log import MAX_LINE_CHARS, Cancelled, Interrupted, JobLogs, Started
from .process import JobProcess
from .reading import read_config, refusal
from .store import Job, JobStore

logger = logging.getLogger("mlxpool.jobs")

LOGS_FOLDER = "jobs"
# A page that asks again and again by mistake.
MAX_WAITING = 100
# A machine that does nothing else lends the GPU sooner.
LASTING_WAIT_S = 0.5
_GPU_LINE = "gpu"
# Modules of processes that compute; they need what a worker's environment has.
_COMPUTING = "mlxpool.worker."


class _Run:
    """A job that has not ended. task: what leads it, from its turn on; process: while there is one."""

    def __init__(self, job: Job, kind: Kind, config: msgspec.Struct) -> None:
        self.job_id = job.id
        self.kind = kind
        self.config = config
        self.task: asyncio.Task[str | None] | None = None
        self.process: JobProcess | None = None
        self.cancelled: str | None = None
        self.last: Done | Failed | None = None


class Jobs:
    """The jobs of a running parent. `open` before the first, `close` before the loop ends."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        run_folder: Path,
        database: Database,
        gpu: Gpu,
        backend: Backend,
        *,
        own_url: str = "",
        env: Mapping[str, str] | None = None,
        kinds: Sequence[Kind] = KINDS,
    ) -> None:
        """settings: as they are now. own_url: the server's address. env: the server's own where None."""
        self.kinds = {kind.name: kind for kind in kinds}
        self.store = JobStore()
        self.subscribe = self.store.subscribe
        self.logs = JobLogs(settings().home / LOGS_FOLDER)
        self._settings = settings
        self._run_folder = run_folder
        self._keeper = JobKeeper(database, self.store)
        self._gpu = gpu
        self._backend = backend
        self._own_url = own_url
        self._env = dict(os.environ if env is None else env)
        self._runs: dict[str, _Run] = {}
        self._lines: dict[str, deque[_Run]] = {}
        self._working: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def open(self) -> None:
        """Take over what a predecessor left: its rows, the unended ones as interrupted, and none of its
        stages."""
        is_read = await self._keeper.open()
        forget = self.store.forgotten

        def forgotten(job_id: str) -> None:
            forget(job_id)
            self.logs.forget(job_id)

        self.store.forgotten = forgotten
        for row in reversed(self.store.rows()):
            if row.active:
                reason = f"the server ended while it {'ran' if row.status == 'running' else 'waited'}"
                self.logs.say(row.id, Interrupted(reason))
                self.store.end(row.id, "interrupted", message="interrupted", error=reason)
        self.store.forget()
        await asyncio.to_thread(clean_stages, self._settings().home)
        if is_read:
            known = {row.id for row in self.store.rows()}
            await asyncio.to_thread(sweep_logs, self._settings().home / LOGS_FOLDER, known)

    async def submit(self, kind_name: str, raw: Mapping[str, Any]) -> Job:
        """The row of a new job, or of the same one where it is under way. Raises ApiError."""
        kind = self.kinds.get(kind_name)
        if kind is None:
            known = ", ".join(self.kinds)
            raise error("invalid_request", f"kind is {cut(kind_name)!r}; use one of: {known}", param="kind")
        self._refuse_when_closed()
        config = read_config(kind.config, raw)
        if isinstance(config, list):
            raise refusal(config)
        plain: dict[str, Any] = msgspec.to_builtins(config)
        known_job = self._find_active(kind_name, plain)
        if known_job is not None:
            return known_job
        faults = await asyncio.to_thread(lambda: kind.faults(config, self._here()))
        if faults:
            raise refusal(faults)
        # The files were looked at on a thread: somebody may have asked the same meanwhile.
        self._refuse_when_closed()
        known_job = self._find_active(kind_name, plain)
        if known_job is not None:
            return known_job
        if sum(run.task is None for run in self._runs.values()) >= MAX_WAITING:
            raise error("queue_full", f"{MAX_WAITING} jobs wait already, the limit", retry_after_s=60)
        job = self.store.add(kind_name, plain)
        self._enqueue(_Run(job, kind, config))
        return job

    def find(self, job_id: str) -> Job:
        """The row. Raises ApiError 404."""
        job = self.store.get(job_id)
        if job is None:
            raise error("not_found", f"no job {cut(job_id)!r} here; GET /api/jobs lists those there are")
        return job

    def cancel(self, job_id: str, why: str = "cancelled") -> Job:
        """End a job; one that has ended stays as it is. Raises ApiError 404."""
        self.find(job_id)
        run = self._runs.get(job_id)
        if run is not None and run.cancelled is None:
            run.cancelled = why
            if run.task is None:
                self._end_cancelled(run)
            elif run.process is not None:
                run.process.stop()
            elif self.store.get(job_id).status == "queued":  # type: ignore[union-attr]
                run.task.cancel()
        return self.find(job_id)

    async def close(self) -> None:
        """End every job and wait until no process is left and everything is written."""
        self._closed = True
        for job_id in list(self._runs):
            self.cancel(job_id, "the server stopped")
        while self._working:
            await asyncio.wait(self._working.values())
        await self.logs.close()
        await self._keeper.close()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise error("shutting_down", "the server is stopping; ask again when it is back")

    def _find_active(self, kind: str, config: dict[str, Any]) -> Job | None:
        job = self.store.find_active(kind, config)
        # One that is being cancelled is no longer what is asked for.
        return None if job is None or self._runs[job.id].cancelled is not None else job

    def _here(self, job_id: str = "") -> Here:
        """Made anew for each look: what it holds is one thread's."""
        settings = self._settings()
        return Here(settings, Library(settings), self._backend, self._own_url, job_id)

    def _enqueue(self, run: _Run) -> None:
        name = _GPU_LINE if run.kind.gpu else f"kind {run.kind.name}"
        self._runs[run.job_id] = run
        self._lines.setdefault(name, deque()).append(run)
        if name not in self._working:
            self._working[name] = asyncio.get_running_loop().create_task(self._work(name))

    async def _work(self, name: str) -> None:
        line = self._lines[name]
        try:
            while line:
                run = line.popleft()
                if run.cancelled is None:
                    run.task = asyncio.get_running_loop().create_task(self._lead(run))
                    await asyncio.wait([run.task])
                    # Here, for a task that is cancelled before its first step runs nothing of its own.
                    self._end(run, None if run.task.cancelled() else run.task.result())
        finally:
            del self._working[name]

    async def _lead(self, run: _Run) -> str | None:
        """A job from its turn until its process is gone. How that ended where it was no exit with 0. Raises
        nothing, but may be cancelled."""
        try:
            needs, argv, env = await asyncio.to_thread(self._prepare, run)
            async with self._lent(run, needs) if needs.gpu else contextlib.nullcontext():
                return await self._process(run, argv, env)
        except ApiError as refused:
            run.last = run.last or Failed(refused.message)
        except Exception as problem:
            logger.exception("job %s", run.job_id)
            run.last = run.last or Failed(f"a fault of the server's: {type(problem).__name__}: {problem}")
        return None

    def _prepare(self, run: _Run) -> tuple[Needs, list[str], dict[str, str]]:
        """What the job needs, and its process. On a thread."""
        here = self._here(run.job_id)
        needs = run.kind.needs(run.config, here)
        argv = run.kind.argv(run.config, here)
        computes = any(word.startswith(_COMPUTING) for word in argv)
        env = worker_environment(self._backend, self._env) if computes else dict(self._env)
        # So that a line is heard when it is said.
        return needs, argv, {**env, "PYTHONUNBUFFERED": "1", **run.kind.env(run.config, here)}

    @contextlib.asynccontextmanager
    async def _lent(self, run: _Run, needs: Needs) -> AsyncIterator[None]:
        """The GPU for this job. Who reads its log is told of a wait that lasts."""
        self.store.progress(run.job_id, 0.0, "waits for the GPU")
        waits = Stage("wait", 0.0, "for the GPU")
        telling = asyncio.get_running_loop().call_later(LASTING_WAIT_S, self.logs.say, run.job_id, waits)
        try:
            async with self._gpu.exclusive(_holder(run), needs.memory_bytes):
                telling.cancel()
                yield
        finally:
            telling.cancel()

    async def _process(self, run: _Run, argv: list[str], env: dict[str, str]) -> str | None:
        """Run it to its end. How it ended where that was no exit with 0."""
        if run.cancelled is not None:
            return None
        self.logs.say(run.job_id, Started())
        self.store.start(run.job_id)
        run.process = JobProcess(lambda line: self._hear(run, line))
        try:
            return await run.process.run(argv, env, self._run_folder)
        except (OSError, ValueError) as problem:
            run.last = Failed(f"the job's process could not be started: {problem}")
            return None
        finally:
            run.process = None

    def _hear(self, run: _Run, line: Line) -> None:
        if isinstance(line, Done | Failed):
            # Its event is told with the row's end: nothing may come after it.
            run.last = line
            return
        self.logs.say(run.job_id, line)
        if isinstance(line, Stage):
            message = cut(f"{line.name} {line.message}".strip(), MAX_LINE_CHARS)
            self.store.progress(run.job_id, line.progress, message)

    def _end(self, run: _Run, crashed: str | None) -> None:
        if isinstance(run.last, Done):
            # Also where it was to be cancelled: it was faster.
            del self._runs[run.job_id]
            self.logs.say(run.job_id, run.last)
            self.store.end(run.job_id, "done", message="done", result=run.last.result)
        elif run.cancelled is not None:
            self._end_cancelled(run)
        else:
            ended = f"the job's process ended: {crashed or 'without a result'}"
            reason = cut(run.last.error if run.last is not None else ended, MAX_LINE_CHARS)
            logger.warning("job %s failed: %s", run.job_id, reason)
            del self._runs[run.job_id]
            self.logs.say(run.job_id, Failed(reason))
            self.store.end(run.job_id, "failed", message="failed", error=reason)

    def _end_cancelled(self, run: _Run) -> None:
        assert run.cancelled is not None
        del self._runs[run.job_id]
        self.logs.say(run.job_id, Cancelled(run.cancelled))
        self.store.end(run.job_id, "cancelled", message=run.cancelled)


def _holder(run: _Run) -> str:
    """Who holds the GPU, for people: the kind and the first thing it is about."""
    fields = run.kind.positional
    what = getattr(run.config, fields[0], "") if fields else ""
    return f"{run.kind.name} {cut(str(what))}".strip()
