"""The rows of jobs in state.sqlite, a moment behind those in memory.

Nothing waits for the file but the server's start and its end. What changed is written by one task, the newest
state of each row at once; mere progress at most once a second. A file that can't be used just now (a full
disk) is tried again until it can, and one that was begun anew gets every row there is.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from mlxpool.parent.database import RETRY_AFTER_S, Database
from mlxpool.parent.faults import Damaged, Unavailable

from . import table
from .store import Job, JobStore

logger = logging.getLogger("mlxpool.jobs")

# A bar that is a second old after a crash is as good as a new one.
PROGRESS_INTERVAL_S = 1.0


class JobKeeper:
    """`open` before use, `close` after the last change."""

    def __init__(self, database: Database, store: JobStore) -> None:
        self._database = database
        self._store = store
        self._statuses: dict[str, str] = {}
        self._changed: set[str] = set()
        self._gone: set[str] = set()
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Whose file it is that the rows are in: one that is opened anew may be another.
        self._met: sqlite3.Connection | None = None
        self._is_failing = False

    async def open(self) -> bool:
        """Load what was kept; whether that could be read. From then on the file follows the store."""
        is_read = True
        try:
            rows, damaged = await self._database.read(self._first)
            self._store.load(rows)
            self._statuses = {row.id: row.status for row in rows}
            if damaged:
                logger.error("%d jobs can't be read in %s; they are left out", damaged, self._database.path)
        except Damaged:
            await self._begin_anew()
        except Unavailable as problem:
            self._failed(problem)
            is_read = False
        self._store.subscribe(self._hear)
        self._store.forgotten = self._forget
        return is_read

    async def close(self) -> None:
        """Returns when everything is written, or can't be."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._write()

    def _hear(self, job: Job) -> None:
        if self._statuses.get(job.id) != job.status:
            self._statuses[job.id] = job.status
            self._urgent.set()
        self._changed.add(job.id)
        self._wake()

    def _forget(self, job_id: str) -> None:
        self._statuses.pop(job_id, None)
        self._changed.discard(job_id)
        self._gone.add(job_id)
        self._wake()

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        while self._changed or self._gone:
            self._urgent.clear()
            if not await self._write():
                await asyncio.sleep(RETRY_AFTER_S)
                continue
            try:
                async with asyncio.timeout(PROGRESS_INTERVAL_S):
                    await self._urgent.wait()
            except TimeoutError:
                pass

    async def _write(self) -> bool:
        """Whether what has changed is in the file now."""
        changed, gone = self._changed, self._gone
        if not changed and not gone:
            return True
        rows = [row for row in map(self._store.get, changed) if row is not None]
        every = list(reversed(self._store.rows()))
        self._changed, self._gone = set(), set()

        used: sqlite3.Connection | None = None

        def work(connection: sqlite3.Connection) -> None:
            nonlocal used
            used = connection
            # In a file that somebody else began there is none of them.
            table.put(rows if connection is self._met else every, connection)
            table.delete(gone, connection)

        def committed() -> None:
            self._met = used

        try:
            try:
                await self._database.run(work, committed)
            except Damaged:
                await self._begin_anew()
                await self._database.run(work, committed)
        except BaseException as problem:
            self._changed |= changed
            self._gone |= gone
            if not isinstance(problem, Unavailable | Damaged):
                raise
            self._failed(problem)
            return False
        self._is_failing = False
        return True

    def _first(self, connection: sqlite3.Connection) -> tuple[list[Job], int]:
        self._met = connection
        return table.read(connection)

    async def _begin_anew(self) -> None:
        try:
            await self._database.begin_anew()
        except Unavailable as problem:
            self._failed(problem)

    def _failed(self, problem: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            logger.error("jobs can't be kept in %s: %s; they run all the same", self._database.path, problem)
