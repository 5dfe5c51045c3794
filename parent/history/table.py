"""The table of stored responses: its layout, what is read of it and what changes it, and its size.

Limits ask for the size after every write, so it is counted along and not summed up. It is taken over with
the commit alone: what is rolled back was never counted. A column may hold anything, for the file lies in
somebody's home: what can't be read is damage of its row, and limits pass over it.

Of the file's thread, except `sizes`, which anybody may read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from mlxpool.parent.database import Migration, give_back

from . import records
from .records import UNFINISHED, Packed, Record

T = TypeVar("T")

# Rows that one transaction lets go: a file far over its limit must not hold up the next read for long.
EVICTED_AT_ONCE = 64
# As much of them as takes some 30 ms.
EVICTED_BYTES = 4 * 2**20
# More than any row may have: what the column says beyond it is nonsense, and its sum must not overflow.
_MAX_ROW_BYTES = 2**40
# Unix seconds; infinity, texts and blobs sort behind it.
_LAST_TIME = 2.0**53

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

_BYTES = f"CASE WHEN typeof(bytes) = 'integer' AND bytes BETWEEN 0 AND {_MAX_ROW_BYTES} THEN bytes ELSE 0 END"
_IS_OPEN = f"status IN ({', '.join(repr(state) for state in sorted(UNFINISHED, reverse=True))})"


def read(response_id: str, events: bool, connection: sqlite3.Connection) -> Record | None:
    """The row with this id. events: whether to read them, which are most of it. Raises Damaged."""
    told = "events" if events else "NULL"
    row = connection.execute(
        f"SELECT created, status, model, background, previous, input, response, {told}"
        " FROM responses WHERE id = ?",
        (response_id,),
    ).fetchone()
    return None if row is None else records.unpack(response_id, row)


def holder(item_id: str, connection: sqlite3.Connection) -> str | None:
    """The id of the response among whose output this item is."""
    row = connection.execute("SELECT response FROM items WHERE item = ?", (item_id,)).fetchone()
    return None if row is None else str(row[0])


def unended(connection: sqlite3.Connection) -> list[str]:
    """Ids of responses that were to go on."""
    rows = connection.execute(f"SELECT id FROM responses WHERE {_IS_OPEN}").fetchall()
    return [str(row[0]) for row in rows]


class Sizes(NamedTuple):
    """How many rows, and the bytes that they count against the limit."""

    entries: int
    bytes: int


class Table:
    """What changes rows. `counting` is what runs a change, `committed` what says that it was."""

    def __init__(self) -> None:
        self.sizes = Sizes(0, 0)
        # Whose file's they are: one that is opened anew may be another.
        self._measured: sqlite3.Connection | None = None
        self._entries = 0
        self._bytes = 0

    def measure(self, connection: sqlite3.Connection) -> None:
        """Know the sizes. Before a change, or without any."""
        if self._measured is not connection:
            row = connection.execute(f"SELECT count(*), coalesce(sum({_BYTES}), 0) FROM responses").fetchone()
            self.sizes, self._measured = Sizes(*row), connection

    def counting(self, work: Callable[[sqlite3.Connection], T], connection: sqlite3.Connection) -> T:
        """What `work` returns, one of the changes below."""
        self.measure(connection)
        self._entries, self._bytes = self.sizes
        return work(connection)

    def committed(self) -> None:
        """The last change was."""
        self.sizes = Sizes(self._entries, self._bytes)

    def insert(self, rows: list[tuple[Record, Packed]], connection: sqlite3.Connection) -> None:
        """New rows; what stood under their ids makes way."""
        for record, packed in rows:
            self.delete(record.id, connection)
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
            self._entries += 1
            self._bytes += packed.bytes

    def end(self, record: Record, packed: Packed, connection: sqlite3.Connection) -> None:
        """This in place of a row that was to go on; nothing where there is none by now."""
        row = connection.execute(
            f"SELECT 1 FROM responses WHERE id = ? AND {_IS_OPEN}", (record.id,)
        ).fetchone()
        if row is not None:
            self.insert([(record, packed)], connection)

    def delete(self, response_id: str, connection: sqlite3.Connection) -> bool:
        """Whether it was there."""
        row = connection.execute("SELECT rowid FROM responses WHERE id = ?", (response_id,)).fetchone()
        if row is not None:
            self._remove(row[0], connection)
        return row is not None

    def trim(self, oldest: float, max_bytes: int, connection: sqlite3.Connection) -> bool:
        """Let some go that are too old or too many; whether there may be more."""
        # Of no time that a clock shows, it would never be the oldest.
        timeless = connection.execute(
            "SELECT rowid, NULL FROM responses WHERE created > ? LIMIT ?", (_LAST_TIME, EVICTED_AT_ONCE)
        ).fetchall()
        dated = connection.execute(
            "SELECT rowid, created FROM responses WHERE created <= ? ORDER BY created, id LIMIT ?",
            (_LAST_TIME, EVICTED_AT_ONCE - len(timeless)),
        ).fetchall()
        before = self._bytes
        for gone, (row_id, created) in enumerate([*timeless, *dated]):
            if created is not None and created > oldest and self._bytes <= max_bytes:
                return False
            if gone and before - self._bytes >= EVICTED_BYTES:
                return True
            self._remove(row_id, connection)
        return len(timeless) + len(dated) == EVICTED_AT_ONCE

    def shrink(self, connection: sqlite3.Connection) -> bool:
        """Give back some of what was let go; whether there is more."""
        return give_back(connection)

    def _remove(self, row_id: int, connection: sqlite3.Connection) -> None:
        (size,) = connection.execute(f"SELECT {_BYTES} FROM responses WHERE rowid = ?", (row_id,)).fetchone()
        connection.execute(
            "DELETE FROM items WHERE response = (SELECT id FROM responses WHERE rowid = ?)", (row_id,)
        )
        connection.execute("DELETE FROM responses WHERE rowid = ?", (row_id,))
        self._entries -= 1
        self._bytes -= size
