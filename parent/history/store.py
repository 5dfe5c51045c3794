"""The stored responses: one table, limits by age and bytes, and what is on its way into it.

An answer is never held up by its row, and a client that goes on from it at once finds it: `keep` makes a
record visible before its last byte is sent, `write` hands it to the file's thread afterwards. What can't be
written (full disk, damaged file) is counted and logged once, and the answer was served all the same. Sizes
are kept in memory; the oldest go first, a bounded number a time, when the file is opened and after writing.

Owned by the event loop, except what `_Table` does, which is the file's thread's.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from mlxpool.parent.database import Database, Migration, give_back
from mlxpool.parent.faults import Damaged, Unavailable
from mlxpool.shared.config import History

from . import records
from .records import UNFINISHED, Packed, Record

logger = logging.getLogger("mlxpool.history")

T = TypeVar("T")

# Rows that one transaction lets go: a file far over its limit must not hold up the next read for long.
EVICTED_AT_ONCE = 64
# Rows that one transaction writes.
WRITTEN_AT_ONCE = 32
# Records that wait for a slow disk are held in memory; more than this are served and not stored.
WAITING_BYTES = 128 * 2**20

MIGRATIONS: tuple[Migration, ...] = (
    (
        """CREATE TABLE responses (
             id TEXT PRIMARY KEY, created REAL NOT NULL, bytes INTEGER NOT NULL, status TEXT NOT NULL,
             model TEXT NOT NULL, background INTEGER NOT NULL, previous TEXT,
             input BLOB NOT NULL, response BLOB NOT NULL, events BLOB)""",
        # Covers what limits ask, so that they read no row.
        "CREATE INDEX responses_by_age ON responses (created, id, bytes)",
        "CREATE INDEX responses_open ON responses (id) WHERE status IN ('queued', 'in_progress')",
        # Clients that refer to an item name it alone.
        "CREATE TABLE items (item TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID",
        "CREATE INDEX items_by_response ON items (response)",
    ),
)


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
        self._table = _Table()
        # Visible at once, until their rows are. Ids that come again replace what was there.
        self._fresh: dict[str, Record] = {}
        self._fresh_bytes = 0
        self._queue: list[Record] = []
        self._writing: asyncio.Task[None] | None = None
        self._unstored = 0
        self._reason: str | None = None

    async def open(self, interrupted: Callable[[Record], Record]) -> None:
        """Read sizes, let go what is over the limits, and end what a predecessor left unended.

        interrupted: what becomes of a record whose run nobody goes on with.
        """
        try:
            try:
                await self._changed(self._table.measure)
                left = await self._database.run(self._table.unended)
            except Damaged:
                await self._begin_anew()
                left = []
            for response_id in left:
                await self._interrupt(response_id, interrupted)
            await self._trim()
        except (Unavailable, Damaged) as err:
            self._failed(str(err))

    async def close(self) -> None:
        """Returns when everything that was handed in is written, or can't be."""
        if self._writing is not None:
            await self._writing

    @property
    def figures(self) -> Figures:
        """As of now."""
        limits, table = self._limits(), self._table
        return Figures(
            table.entries,
            table.bytes,
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

    # ---- reading ----------------------------------------------------------------------------------------

    async def get(self, response_id: str) -> Record | None:
        """The record, None for unknown and expired ones. Raises Damaged, and Unavailable."""
        record = self._fresh.get(response_id)
        if record is None:
            record = await self._database.run(partial(_read, response_id))
        if record is None or record.created <= self._now() - self._limits().max_age:
            return None
        return record

    async def holder_of(self, item_id: str) -> Record | None:
        """The record among whose output this item is. Raises like `get`."""
        for record in self._fresh.values():
            if item_id in record.items:
                return record
        response_id = await self._database.run(partial(_holder, item_id))
        return None if response_id is None else await self.get(response_id)

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
            self._failed("the disk is slower than answers are made")
            return
        self._queue.append(record)
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def put(self, record: Record) -> bool:
        """Written when this returns; False where it could not be."""
        self.keep(record)
        packed = await asyncio.to_thread(records.pack, record)
        if self._fresh.get(record.id) is not record:
            return True  # deleted in the meantime
        try:
            return await self._insert([(record, packed)])
        except (Unavailable, Damaged) as err:
            self._failed(str(err))
            return False
        finally:
            self._forget(record)

    async def delete(self, response_id: str) -> bool:
        """Whether there was one, of whatever age or damage. Raises Unavailable."""
        fresh = self._fresh.get(response_id)
        if fresh is not None:
            self._forget(fresh)
        self._queue = [record for record in self._queue if record.id != response_id]
        # Behind whatever is being written just now, on the same thread.
        stored = await self._changed(partial(self._table.delete, response_id))
        return stored or fresh is not None

    # ---- inside -----------------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        try:
            while self._queue:
                batch, self._queue = self._queue[:WRITTEN_AT_ONCE], self._queue[WRITTEN_AT_ONCE:]
                packed = await asyncio.to_thread(lambda some: [records.pack(one) for one in some], batch)
                # Deleted while it was packed: it must not come back.
                rows = [
                    (record, parts)
                    for record, parts in zip(batch, packed, strict=True)
                    if self._fresh.get(record.id) is record
                ]
                try:
                    await self._insert(rows)
                except (Unavailable, Damaged) as err:
                    self._failed(str(err), len(rows))
                for record in batch:
                    self._forget(record)
        finally:
            self._writing = None

    async def _insert(self, rows: list[tuple[Record, Packed]]) -> bool:
        """Whether all of them were."""
        limit = self._limits().max_bytes
        fitting = [row for row in rows if row[1].bytes <= limit]
        if len(fitting) < len(rows):
            self._failed(f"longer than history.max_bytes ({limit})", len(rows) - len(fitting))
        if not fitting:
            return not rows
        await self._changed(partial(self._table.insert, fitting))
        if self._reason is not None and len(fitting) == len(rows):
            logger.info("answers are stored again")
            self._reason = None
        await self._trim()
        return len(fitting) == len(rows)

    async def _changed(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            done = await self._database.run(work)
        except Damaged:
            await self._begin_anew()
            done = await self._database.run(work)
        self._table.is_measured = True
        return done

    async def _begin_anew(self) -> None:
        self._table.is_measured = False
        await self._database.begin_anew()

    async def _trim(self) -> None:
        limits = self._limits()
        oldest = self._now() - limits.max_age
        while await self._changed(partial(self._table.trim, oldest, limits.max_bytes)):
            pass

    async def _interrupt(self, response_id: str, interrupted: Callable[[Record], Record]) -> None:
        try:
            record = await self._database.run(partial(_read, response_id))
        except Damaged:
            await self._changed(partial(self._table.delete, response_id))
            return
        if record is not None:
            await self.put(interrupted(record))

    def _forget(self, record: Record) -> None:
        if self._fresh.get(record.id) is record:
            del self._fresh[record.id]
            self._fresh_bytes -= record.raw_bytes

    def _failed(self, reason: str, count: int = 1) -> None:
        self._unstored += count
        if self._reason is None:
            logger.error("answers are served and not stored: %s", reason)
        self._reason = reason


def _read(response_id: str, connection: sqlite3.Connection) -> Record | None:
    row = connection.execute(
        "SELECT created, status, model, background, previous, input, response, events FROM responses"
        " WHERE id = ?",
        (response_id,),
    ).fetchone()
    if row is None:
        return None
    created, status, model, background, previous, *packed = row
    return records.unpack(response_id, created, status, model, background, previous, packed)


def _holder(item_id: str, connection: sqlite3.Connection) -> str | None:
    row = connection.execute("SELECT response FROM items WHERE item = ?", (item_id,)).fetchone()
    return None if row is None else str(row[0])


class _Table:
    """Statements that change the table, and its size. On the file's thread; the loop only reads the sizes.

    is_measured: whether the sizes are those of the file. What is rolled back has changed them in vain, so
    they are not until whoever ran a statement says that it was committed.
    """

    def __init__(self) -> None:
        self.entries = 0
        self.bytes = 0
        self.is_measured = False

    def measure(self, connection: sqlite3.Connection) -> None:
        """Know the sizes, and doubt them from now on."""
        if not self.is_measured:
            self.entries, self.bytes = connection.execute(
                "SELECT count(*), coalesce(sum(bytes), 0) FROM responses"
            ).fetchone()
        self.is_measured = False

    def unended(self, connection: sqlite3.Connection) -> list[str]:
        """Ids of responses that were to go on."""
        states = ", ".join(f"'{state}'" for state in sorted(UNFINISHED, reverse=True))
        rows = connection.execute(f"SELECT id FROM responses WHERE status IN ({states})").fetchall()
        return [str(row[0]) for row in rows]

    def insert(self, rows: list[tuple[Record, Packed]], connection: sqlite3.Connection) -> None:
        """New rows; what stood under their ids makes way."""
        self.measure(connection)
        for record, packed in rows:
            self._remove(record.id, connection)
            connection.execute(
                "INSERT INTO responses (id, created, bytes, status, model, background, previous, input,"
                " response, events) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    record.id,
                    record.created,
                    packed.bytes,
                    record.status,
                    record.model,
                    int(record.background),
                    record.previous,
                    packed.input,
                    packed.response,
                    packed.events,
                ),
            )
            connection.executemany(
                "INSERT OR REPLACE INTO items (item, response) VALUES (?, ?)",
                [(item, record.id) for item in record.items],
            )
            self.entries += 1
            self.bytes += packed.bytes

    def delete(self, response_id: str, connection: sqlite3.Connection) -> bool:
        """Whether it was there."""
        self.measure(connection)
        was = self._remove(response_id, connection)
        if was:
            give_back(connection)
        return was

    def trim(self, oldest: float, max_bytes: int, connection: sqlite3.Connection) -> bool:
        """Let some go that are too old or too many; whether there may be more."""
        self.measure(connection)
        rows = connection.execute(
            "SELECT id, created, bytes FROM responses ORDER BY created, id LIMIT ?", (EVICTED_AT_ONCE,)
        ).fetchall()
        gone = 0
        for response_id, created, _ in rows:
            if created > oldest and self.bytes <= max_bytes:
                break
            self._remove(response_id, connection)
            gone += 1
        if gone:
            give_back(connection)
        return gone == EVICTED_AT_ONCE

    def _remove(self, response_id: str, connection: sqlite3.Connection) -> bool:
        row = connection.execute("SELECT bytes FROM responses WHERE id = ?", (response_id,)).fetchone()
        if row is None:
            return False
        connection.execute("DELETE FROM items WHERE response = ?", (response_id,))
        connection.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        self.entries -= 1
        self.bytes -= row[0]
        return True
