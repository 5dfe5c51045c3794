"""The table of jobs in state.sqlite: its layout, and how rows get in and out.

A column may hold anything, for the file lies in somebody's home: a row that can't be read is passed over.

Of the file's thread.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable

import msgspec

from mlxpool.parent.database import Migration

from .store import Job

MIGRATIONS: tuple[Migration, ...] = (
    (
        """CREATE TABLE jobs (
             id TEXT PRIMARY KEY, kind TEXT NOT NULL, config TEXT NOT NULL, status TEXT NOT NULL,
             progress REAL NOT NULL, message TEXT NOT NULL, result TEXT, error TEXT,
             created REAL NOT NULL, started REAL, ended REAL)""",
    ),
)

_COLUMNS = Job.__struct_fields__
# The id becomes a file's name.
_ID = re.compile(r"job_[0-9a-f]{16}")
# Unix seconds of no clock: what sorts or is shown by them must not meet infinity.
_LAST_TIME = 2.0**40


def read(connection: sqlite3.Connection) -> tuple[list[Job], int]:
    """Every row that can be read, oldest first, and how many can't."""
    rows = connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs ORDER BY created, id").fetchall()
    jobs = [job for row in rows if (job := _unpack(row)) is not None]
    return jobs, len(rows) - len(jobs)


def put(jobs: Iterable[Job], connection: sqlite3.Connection) -> None:
    """These rows in place of what stands under their ids."""
    marks = ", ".join("?" * len(_COLUMNS))
    connection.executemany(
        f"INSERT OR REPLACE INTO jobs ({', '.join(_COLUMNS)}) VALUES ({marks})", [_pack(job) for job in jobs]
    )


def delete(ids: Iterable[str], connection: sqlite3.Connection) -> None:
    """Rows that are forgotten."""
    connection.executemany("DELETE FROM jobs WHERE id = ?", [(job_id,) for job_id in ids])


def _pack(job: Job) -> tuple[object, ...]:
    fields = msgspec.structs.asdict(job)
    for name in ("config", "result"):
        fields[name] = None if fields[name] is None else msgspec.json.encode(fields[name]).decode()
    return tuple(fields.values())


def _unpack(row: tuple[object, ...]) -> Job | None:
    fields = dict(zip(_COLUMNS, row, strict=True))
    try:
        for name in ("config", "result"):
            value = fields[name]
            if value is not None:
                if not isinstance(value, str):
                    return None
                fields[name] = msgspec.json.decode(value)
        job = msgspec.convert(fields, Job)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    times = [at for at in (job.created, job.started, job.ended) if at is not None]
    # A row that ended has its time: a client counts on it.
    is_sound = _ID.fullmatch(job.id) and all(0 <= at < _LAST_TIME for at in times) and 0 <= job.progress <= 1
    return job if is_sound and (job.active or job.ended is not None) else None
