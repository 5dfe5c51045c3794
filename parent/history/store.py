"""The stored responses: limits by age and bytes, and what is on its way into the file.

An answer is never held up by its row, and a client that goes on from it at once finds it: `keep` makes a
record visible before its last byte is sent, `write` hands it to the file's thread afterwards. What can't be
written (full disk, damaged file) is counted and logged once, and the answer was served all the same. The
oldest go first, a bounded number a time, when the file is opened, after writing, and when limits change.

A response that runs without its client has a row before it has an end. Where its end can't be written, or
nobody goes on with it, it is answered as failed, with the reason, and its row says so as soon as it can.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec

from mlxpool.parent.database import Database
from mlxpool.parent.faults import Damaged, Unavailable
from mlxpool.shared.config import History
from mlxpool.shared.errors import error

from . import records, table
from .records import UNFINISHED, Packed, Record
from .table import Table

logger = logging.getLogger("mlxpool.history")

T = TypeVar("T")

# Rows that one transaction writes.
WRITTEN_AT_ONCE = 32
# Records that wait for a slow disk are held in memory; more than this are served and not stored.
WAITING_BYTES = 128 * 2**20


class Figures(msgspec.Struct, frozen=True):
    """The body of `GET /api/history`. bytes: as stored. unstored: answers that could not be written since the
    start; reason: why the last of them was not, None once one was again."""

    entries: int
    bytes: int
    max_bytes: int
    max_age_s: float
    unstored: int = 0
    reason: str | None = None


class HistoryStore:
    """`open` before use, `close` after the last. limits: [history] as it is now."""

    def __init__(
        self, database: Database, limits: Callable[[], History], now: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self._limits = limits
        self._now = now
        self._table = Table()
        # Visible at once, until their rows are. Ids that come again replace what was there.
        self._fresh: dict[str, Record] = {}
        self._fresh_bytes = 0
        self._queue: list[Record] = []
        # Held over a look at what is fresh and the change that follows from it.
        self._changing = asyncio.Lock()
        self._working: asyncio.Task[None] | None = None
        self._again = False  # something has changed since the work at hand was begun
        self._closing = False
        self._interrupted: Callable[[Record], Record] = lambda record: record
        # Ids whose rows say that they go on: those that do, and those whose end was lost, with the reason.
        self._going: set[str] = set()
        self._lost: dict[str, str] = {}
        self._owes_ends = True
        self._unstored = 0
        self._reason: str | None = None

    async def open(self, interrupted: Callable[[Record], Record]) -> None:
        """Read sizes, let go what is over the limits, and end what a predecessor left unended; what of it
        can't be done now is done after the first write that can.

        interrupted: what becomes of a record whose run nobody goes on with.
        """
        self._interrupted = interrupted
        try:
            try:
                await self._database.read(self._table.measure)
                await self._end_rows()
            except Damaged:
                await self._database.begin_anew()
            await self._trim()
        except (Unavailable, Damaged) as err:
            self._failed(str(err), 0)

    async def close(self) -> None:
        """Returns when everything that was handed in is written, or can't be. What can wait for the next
        start is left to it."""
        self._closing = True
        try:
            while self._working is not None:
                await self._working
        finally:
            self._closing = False

    @property
    def figures(self) -> Figures:
        """As of now."""
        limits, sizes = self._limits(), self._table.sizes
        return Figures(
            sizes.entries,
            sizes.bytes,
            limits.max_bytes,
            limits.max_age,
            self._unstored,
            self._reason,
        )

    @property
    def is_on(self) -> bool:
        """Whether anything is kept at all."""
        limits = self._limits()
        return limits.max_bytes > 0 and limits.max_age > 0

    def limits_changed(self) -> None:
        """Let go what is over them now."""
        self._wake()

    # ---- reading ----------------------------------------------------------------------------------------

    async def get(self, response_id: str, *, events: bool = True) -> Record | None:
        """The record, None for unknown and expired ones, and all where history is off. events: whether they
        are wanted, which are most of it. Raises Damaged, and Unavailable.

        A row that says that its response goes on comes back failed, with the reason: ask those that run
        before.
        """
        if not self.is_on:
            return None
        record = self._fresh.get(response_id)
        if record is None:
            record = await self._database.read(partial(table.read, response_id, events))
            if record is not None and record.status in UNFINISHED:
                record = self._ended(record)
        if record is None or record.created <= self._now() - self._limits().max_age:
            return None
        return record

    async def holder_of(self, item_id: str) -> Record | None:
        """The record among whose output this item is, without its events. Raises like `get`."""
        for record in self._fresh.values():
            if item_id in record.items:
                return record
        response_id = await self._database.read(partial(table.holder, item_id))
        return None if response_id is None else await self.get(response_id, events=False)

    # ---- writing ----------------------------------------------------------------------------------------

    def keep(self, record: Record) -> None:
        """Let it be found from now on. `write` must follow."""
        replaced = self._fresh.get(record.id)
        self._fresh_bytes += record.raw_bytes - (replaced.raw_bytes if replaced is not None else 0)
        self._fresh[record.id] = record

    def write(self, record: Record) -> None:
        """Have it written, whenever that is."""
        if self._fresh.get(record.id) is not record:
            return  # deleted, or replaced, in the meantime
        if self._fresh_bytes > WAITING_BYTES and self._fresh_bytes > record.raw_bytes:
            self._forget(record)
            self._lose([record], "the disk is slower than answers are made")
        else:
            self._queue.append(record)
        self._wake()

    async def put(self, record: Record) -> bool:
        """Written when this returns; False where it could not be. One that is to go on does, until a further
        one of its id is written or can't be."""
        self.keep(record)
        try:
            packed = await asyncio.to_thread(records.pack, record)
            async with self._changing:
                if self._fresh.get(record.id) is not record:
                    return True  # deleted in the meantime
                stored = await self._insert([(record, packed)])
        except (Unavailable, Damaged) as err:
            self._lose([record], str(err))
            return False
        except asyncio.CancelledError:
            # Its row may come to be, and nobody goes on with it.
            self._owes_ends = True
            raise
        finally:
            self._forget(record)
        self._wake()
        return stored

    async def delete(self, response_id: str) -> bool:
        """Whether there was one, of whatever age or damage. Raises Unavailable, and then it is as it was."""
        async with self._changing:
            stored = await self._changed(partial(self._table.delete, response_id))
            fresh = self._fresh.get(response_id)
            if fresh is not None:
                self._forget(fresh)
            self._queue = [record for record in self._queue if record.id != response_id]
            self._going.discard(response_id)
        self._wake()
        return stored or fresh is not None

    # ---- inside -----------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._again = True
        if self._working is None:
            self._working = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._again:
                self._again = False
                written = True
                while self._queue:
                    batch, self._queue = self._queue[:WRITTEN_AT_ONCE], self._queue[WRITTEN_AT_ONCE:]
                    written = await self._write(batch)
                # A file that has just refused is asked again with the next write.
                if written:
                    await self._tidy()
        finally:
            self._working = None

    async def _write(self, batch: list[Record]) -> bool:
        """False where the file can't be used."""
        try:
            packed = await asyncio.to_thread(lambda: [records.pack(record) for record in batch])
            async with self._changing:
                # Deleted, or replaced, while it was packed: it must not come back.
                await self._insert(
                    [
                        (record, parts)
                        for record, parts in zip(batch, packed, strict=True)
                        if self._fresh.get(record.id) is record
                    ]
                )
        except Exception as err:
            if not isinstance(err, Unavailable | Damaged):
                logger.exception("writing answers")
            self._lose([record for record in batch if self._fresh.get(record.id) is record], str(err))
            return False
        finally:
            for record in batch:
                self._forget(record)
        return True

    async def _insert(self, rows: list[tuple[Record, Packed]]) -> bool:
        """Whether all of them were."""
        limits = self._limits()
        fitting = [row for row in rows if row[1].bytes <= limits.max_bytes]
        if fitting:
            await self._changed(partial(self._table.insert, fitting))
        for record, _ in fitting:
            if record.status in UNFINISHED:
                self._going.add(record.id)
            else:
                self._going.discard(record.id)
        if len(fitting) < len(rows):
            long = [row[0] for row in rows if row[1].bytes > limits.max_bytes]
            self._lose(long, f"longer than history.max_bytes ({limits.max_bytes})")
        elif fitting and self._reason is not None:
            logger.info("answers are stored again")
            self._reason = None
        if fitting:
            await self._tried(self._trim)
        return len(fitting) == len(rows)

    async def _tidy(self) -> None:
        """What nobody waits for."""
        await self._tried(self._trim)
        await self._tried(self._end_rows)
        shrunk = False
        while not (self._queue or self._closing) and await self._tried(self._shrink):
            shrunk = True
        if shrunk:
            await self._tried(self._database.write_back)

    async def _tried(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """None where it can't be done now: it is tried again after the next write."""
        try:
            return await work()
        except (Unavailable, Damaged) as err:
            logger.debug("%s", err)
        except Exception:
            logger.exception("keeping the history in order")
        return None

    async def _changed(self, work: Callable[[sqlite3.Connection], T]) -> T:
        counted = partial(self._table.counting, work)
        try:
            return await self._database.run(counted, self._table.committed)
        except Damaged:
            await self._database.begin_anew()
            return await self._database.run(counted, self._table.committed)

    async def _trim(self) -> None:
        while True:
            limits = self._limits()
            oldest = self._now() - limits.max_age
            more = await self._changed(partial(self._table.trim, oldest, limits.max_bytes))
            if not more or self._closing:
                return

    async def _shrink(self) -> bool:
        return await self._changed(self._table.shrink)

    async def _end_rows(self) -> None:
        """Have rows say that they have ended, which say that they go on and do not."""
        if not self._owes_ends:
            return
        self._owes_ends = False
        lost = set(self._lost)
        try:
            for response_id in await self._database.read(table.unended):
                if response_id not in self._going and response_id not in self._fresh:
                    await self._end_row(response_id)
        except BaseException:
            self._owes_ends = True
            raise
        for response_id in lost:
            self._lost.pop(response_id, None)

    async def _end_row(self, response_id: str) -> None:
        try:
            record = await self._database.read(partial(table.read, response_id, False))
        except Damaged:
            await self._changed(partial(self._table.delete, response_id))
            return
        if record is not None:
            ended = self._ended(record)
            packed = await asyncio.to_thread(records.pack, ended)
            await self._changed(partial(self._table.end, ended, packed))

    def _ended(self, record: Record) -> Record:
        reason = self._lost.get(record.id)
        if reason is None:
            return self._interrupted(record)
        why = f"what this response came to could not be stored ({reason}); send it again"
        return records.failed(record, error("internal_error", why))

    def _lose(self, lost: list[Record], reason: str) -> None:
        """They are not stored. Called before they are forgotten, or at once after."""
        for record in lost:
            if record.id in self._going:
                self._going.discard(record.id)
                self._lost[record.id] = reason
                self._owes_ends = True
        self._failed(reason, len(lost))

    def _forget(self, record: Record) -> None:
        if self._fresh.get(record.id) is record:
            del self._fresh[record.id]
            self._fresh_bytes -= record.raw_bytes

    def _failed(self, reason: str, count: int = 1) -> None:
        self._unstored += count
        if self._reason is None:
            logger.error("answers are served and not stored: %s", reason)
        self._reason = reason
