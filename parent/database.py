"""state.sqlite: what the parent remembers over restarts, in one file, used by one thread.

Whoever stores something hands in work that runs on that thread, in one transaction; nothing else touches the
connection, so SQLite is never asked from two sides. The file is a convenience, never a condition of serving:
one that is damaged, foreign or of a later version is moved aside (never deleted) and a new one begun; one
that can't be used just now (full disk, locked, no rights) makes the work at hand `Unavailable` and is tried
again with the next.

Written in WAL mode with synchronous=NORMAL: a killed process loses nothing that was committed, a machine that
loses its power the last moments at most. Pages that are freed are used again, and those at the file's end
given back a bounded number at a time (auto_vacuum=INCREMENTAL), so that no request waits for a VACUUM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from .faults import Damaged, Unavailable

logger = logging.getLogger("mlxpool.state")

FILE_NAME = "state.sqlite"
# "mlxp", in the file's header: another program's database is not ours to change.
APPLICATION_ID = 0x6D6C7870
# Another process that reads the file (a backup, a person) is waited for this long, no more: answers wait too.
BUSY_TIMEOUT_S = 1.0
# A disk that was full a moment ago need not be asked for every request.
RETRY_AFTER_S = 5.0
# Of 4 KiB: what one call gives back to the file system, some milliseconds of work.
VACUUM_PAGES = 256
# What the write-ahead log keeps of the disk after a large write: what SQLite lets it grow to by itself.
JOURNAL_BYTES = 4 * 2**20

_READ = "BEGIN"
# Whoever reads first and writes then is refused at once where another process wrote in between: SQLite waits
# for those alone that say at the beginning that they will write.
_CHANGE = "BEGIN IMMEDIATE"

T = TypeVar("T")
# One step of the file's layout: statements that lead from the version before it.
Migration = tuple[str, ...]


class _NotOurs(Exception):
    """The file must make way for a new one."""


class Database:
    """`close` it at the end. migrations: all there ever were, oldest first."""

    def __init__(self, path: Path, migrations: Sequence[Migration]) -> None:
        self.path = path
        self._migrations = migrations
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="state")
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._retry_at = 0.0
        self._refused = ""

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` returns, which only reads, and runs in a transaction of its own on the file's thread.

        Raises Unavailable; Damaged where the file holds nonsense there.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, _READ, work)

    async def run(
        self, work: Callable[[sqlite3.Connection], T], committed: Callable[[], None] = lambda: None
    ) -> T:
        """`read` for work that changes something. committed: called on the thread, before any other work,
        once it is. Raises like `read`, and then nothing of it was done.

        A connection that work has not met before is that of a file which was opened since.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._run, _CHANGE, work, committed
        )

    async def write_back(self) -> None:
        """Bring what was committed from the log into the file, which ends where its pages do from then on.
        Raises Unavailable."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write_back)

    async def begin_anew(self) -> None:
        """Begin a new file in place of one whose pages are damaged. Raises Unavailable."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._begin_anew)

    async def close(self) -> None:
        """After everything that was handed in before."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    # ---- on the thread ----------------------------------------------------------------------------------

    def _run(
        self,
        begin: str,
        work: Callable[[sqlite3.Connection], T],
        committed: Callable[[], None] = lambda: None,
    ) -> T:
        connection = self._opened()
        try:
            done = _transact(connection, begin, work)
        except sqlite3.Error as err:
            if _is_damage(err):
                raise Damaged(str(err)) from err
            if _is_gone(err) or connection.in_transaction:
                self._close()
            raise Unavailable(str(err)) from err
        committed()
        return done

    def _write_back(self) -> None:
        try:
            # Passive: waits for nobody, and leaves to the next time what somebody still reads.
            self._opened().execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as err:
            raise Unavailable(str(err)) from err

    def _begin_anew(self) -> None:
        self._close()
        try:
            self._move_aside("its pages are damaged")
        except FileNotFoundError:
            pass  # somebody did it
        except OSError as err:
            raise Unavailable(f"{self.path} is damaged and can't be moved: {err}") from err

    def _opened(self) -> sqlite3.Connection:
        # Of a file that was taken away SQLite goes on writing what nobody will find again.
        if self._connection is not None and _inode(self.path) != self._inode:
            self._close()
        if self._connection is not None:
            return self._connection
        if time.monotonic() < self._retry_at:
            raise Unavailable(self._refused)
        try:
            try:
                self._connection = self._open()
            except _NotOurs as why:
                self._move_aside(str(why))
                self._connection = self._open()
        except (sqlite3.Error, OSError, _NotOurs) as err:
            self._refused = f"{self.path}: {err}"
            self._retry_at = time.monotonic() + RETRY_AFTER_S
            raise Unavailable(self._refused) from err
        self._inode = _inode(self.path)
        return self._connection

    def _open(self) -> sqlite3.Connection:
        """A connection to a file of the newest layout. Raises _NotOurs."""
        if self.path.exists() and not self.path.is_file():
            raise _NotOurs("it is no file")
        if not self.path.exists():
            # Conversations are their owner's: SQLite's further files take over these rights.
            os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600))
        connection = sqlite3.connect(
            self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        # A text that is no text is its row's fault, and for whoever reads that row to find.
        connection.text_factory = _text
        try:
            self._prepare(connection)
        except sqlite3.Error as err:
            connection.close()
            if _is_damage(err):
                raise _NotOurs(str(err)) from err
            raise
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        (owner,) = connection.execute("PRAGMA application_id").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if owner != APPLICATION_ID and (owner or tables):
            raise _NotOurs("it is another program's")
        if version > len(self._migrations):
            raise _NotOurs(f"a later version of mlxpool wrote it (layout {version})")
        if not owner:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
        for number in range(version, len(self._migrations)):

            def migrate(connection: sqlite3.Connection, number: int = number) -> None:
                for statement in self._migrations[number]:
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {number + 1}")

            _transact(connection, _CHANGE, migrate)

    def _move_aside(self, why: str) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S")
        base = self.path.with_name(f"{self.path.name}.unusable-{stamp}")
        target, number = base, 1
        while target.exists():
            number += 1
            target = base.with_name(f"{base.name}-{number}")
        os.rename(self.path, target)
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{target}{suffix}")
        logger.error("%s can't be used (%s): it is now %s, and a new one is begun", self.path, why, target)

    def _close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def give_back(connection: sqlite3.Connection) -> bool:
    """Return some of the pages that hold nothing to the file system; whether it did, and there are more.
    Inside of a transaction."""
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    for _ in range(min(free, VACUUM_PAGES)):
        # One at a time: the module steps a statement without columns once, and each step gives back a page.
        connection.execute("PRAGMA incremental_vacuum(1)")
    (left,) = connection.execute("PRAGMA freelist_count").fetchone()
    # A file that another program has rebuilt gives none back.
    return bool(0 < left < free)


def _transact(connection: sqlite3.Connection, begin: str, work: Callable[[sqlite3.Connection], T]) -> T:
    connection.execute(begin)
    try:
        done = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        raise
    return done


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _is_damage(err: sqlite3.Error) -> bool:
    return getattr(err, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _is_gone(err: sqlite3.Error) -> bool:
    """Whether the file's disk failed or may not be written any more: the next work opens it again."""
    return getattr(err, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR)
