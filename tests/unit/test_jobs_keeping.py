"""Jobs over restarts: rows and logs that stay, what a killed server left, and files that can't be used."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from mlxpool.parent.database import FILE_NAME, Database
from mlxpool.parent.faults import Unavailable
from mlxpool.parent.jobs import keeping, store
from mlxpool.parent.jobs.boot import clean_stages
from mlxpool.parent.migrations import MIGRATIONS
from mlxpool.shared import staging
from tests.tools.served import until
from tests.unit.jobs_world import DONE, FOREVER, WAIT_S, running, stage


def rows(home: Path, columns: str = "id, status, progress") -> list[tuple[object, ...]]:
    """What stands in the file."""
    with closing(sqlite3.connect(home / FILE_NAME)) as connection:
        return connection.execute(f"SELECT {columns} FROM jobs ORDER BY created, id").fetchall()


def change(home: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(home / FILE_NAME)) as connection, connection:
        connection.execute(statement, values)


async def test_ended_rows_and_their_logs_are_there_after_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        job = await world.submit(f"say('a word')\n{DONE}")
        bad = await world.submit("sys.exit(3)", number=2)
        ended, failed = await world.until(job, "done"), await world.until(bad, "failed")
        events = await world.events(job)
    async with running(tmp_path) as world:
        assert world.jobs.store.rows() == [failed, ended]
        assert await world.events(job) == events
        # The order goes on where it was.
        new = await world.submit(DONE)
        assert [row.id for row in world.jobs.store.rows()] == [new.id, bad.id, job.id]


async def test_what_a_killed_server_left_unended_is_interrupted(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        job = await world.submit(f"{stage(0.4, 'at it')}\n{FOREVER}")
        waiting = await world.submit(DONE, number=2)
        await world.until(job, "running", message="at it")
        await until(lambda: rows(tmp_path, "status, progress") == [("running", 0.4), ("queued", 0.0)], WAIT_S)
        log = world.jobs.logs.path(job.id).read_bytes()
        with closing(sqlite3.connect(tmp_path / FILE_NAME)) as now:
            left = now.serialize()
    # As if it had been killed then.
    (tmp_path / FILE_NAME).write_bytes(left)
    world.jobs.logs.path(job.id).write_bytes(log)
    world.jobs.logs.path(waiting.id).unlink()
    async with running(tmp_path) as world:
        ran, waited = world.jobs.find(job.id), world.jobs.find(waiting.id)
        assert (ran.status, ran.progress, ran.message) == ("interrupted", 0.4, "interrupted")
        assert (ran.error, waited.error) == (
            "the server ended while it ran",
            "the server ended while it waited",
        )
        assert ran.ended is not None
        assert ran.started is not None
        assert ran.ended >= ran.started
        assert [kind for kind, _ in await world.events(job)] == ["started", "stage", "interrupted"]
        assert await world.events(waiting) == [("interrupted", {"error": "the server ended while it waited"})]
        last = world.jobs.logs.path(job.id).read_bytes().splitlines()[-1]
        assert b'"type":"interrupted"' in last
        again = await world.submit(DONE, number=2)
        await world.until(again, "done")


async def test_rows_that_are_too_many_go_with_their_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_ENDED_ROWS", 2)
    async with running(tmp_path) as world:
        jobs = []
        for number in range(4):
            jobs.append(await world.submit(DONE, number=number))
            await world.until(jobs[-1], "done")
        stray = tmp_path / "jobs" / "job_0123456789abcdef.ndjson"
        stray.write_text("{}\n")
        (tmp_path / "jobs" / "notes.txt").write_text("mine")
        first = world.jobs.logs.path(jobs[0].id)
        await until(lambda: not first.exists(), WAIT_S)
    async with running(tmp_path) as world:
        kept = [job.id for job in jobs[2:]]
        assert [row.id for row in reversed(world.jobs.store.rows())] == kept
        assert sorted(path.name for path in (tmp_path / "jobs").iterdir()) == sorted(
            [*(f"{job_id}.ndjson" for job_id in kept), "notes.txt"]
        )
    assert [row[0] for row in rows(tmp_path)] == kept


@pytest.mark.parametrize(
    "damage",
    [
        "config = '['", "config = '[]'", "config = x'ff'", "status = 'baking'", "progress = 9e999",
        "progress = 'x'", "created = -1", "created = 9e999", "ended = NULL", "id = '../../x'", "result = 7",
        "message = x'00'",
    ],
)  # fmt: skip
async def test_a_row_that_makes_no_sense_is_left_out(tmp_path: Path, damage: str) -> None:
    async with running(tmp_path) as world:
        good, bad = await world.submit(DONE), await world.submit(DONE, number=2)
        await world.until(bad, "done")
    change(tmp_path, f"UPDATE jobs SET {damage} WHERE id = ?", bad.id)
    async with running(tmp_path) as world:
        assert [row.id for row in world.jobs.store.rows()] == [good.id]
        await world.until(await world.submit(DONE, number=3), "done")


async def test_a_file_that_is_damaged_makes_way_and_jobs_run(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    async with running(tmp_path) as world:
        job = await world.submit(DONE)
        await world.until(job, "done")
    assert [row[:2] for row in rows(tmp_path)] == [(job.id, "done")]
    assert len([name for name in os.listdir(tmp_path) if ".unusable-" in name]) == 1


async def test_a_file_that_cannot_be_used_is_caught_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "RETRY_AFTER_S", 0.01)
    async with running(tmp_path) as world:
        real, tried = world.database.run, asyncio.Event()

        async def full(*_: object) -> None:
            tried.set()
            raise Unavailable("database or disk is full")

        monkeypatch.setattr(world.database, "run", full)
        job = await world.submit(DONE)
        ended = await world.until(job, "done")
        assert ended.result == {"answer": 42}
        await asyncio.wait_for(tried.wait(), WAIT_S)
        assert rows(tmp_path) == []
        monkeypatch.setattr(world.database, "run", real)
        await until(lambda: rows(tmp_path) == [(job.id, "done", 1.0)], WAIT_S)


async def test_a_file_that_was_taken_away_gets_every_row(tmp_path: Path) -> None:
    async with running(tmp_path) as world:
        first = await world.submit(DONE)
        await world.until(first, "done")
        await until(lambda: rows(tmp_path) == [(first.id, "done", 1.0)], WAIT_S)
        for name in os.listdir(tmp_path):
            if name.startswith(FILE_NAME):
                (tmp_path / name).unlink()
        second = await world.submit(DONE, number=2)
        await world.until(second, "done")
    assert [row[:2] for row in rows(tmp_path)] == [(first.id, "done"), (second.id, "done")]


async def test_progress_is_written_no_more_than_once_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "PROGRESS_INTERVAL_S", 600.0)
    async with running(tmp_path) as world:
        real, written = world.database.run, 0

        async def counting(*arguments: object) -> object:
            nonlocal written
            written += 1
            return await real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(world.database, "run", counting)
        says = "\n".join(stage(n / 200, f"step {n}") for n in range(200))
        job = await world.submit(f"{says}\n{DONE}")
        await world.until(job, "done")
        await until(lambda: rows(tmp_path) == [(job.id, "done", 1.0)], WAIT_S)
        # Of each status once at most; nothing of the two hundred steps by itself.
        assert written <= 4


def test_stages_of_killed_jobs_are_removed_and_those_of_pulls_stay(tmp_path: Path) -> None:
    models, adapters, datasets = (tmp_path / name for name in ("models", "adapters", "datasets"))
    for folder in (
        models / ".staging-half", models / ".staging-org--big" / "parts", models / ".staging-smollm2-135m",
        models / "whole", models / ".staging-busy", adapters / ".staging-a", adapters / "b",
    ):  # fmt: skip
        folder.mkdir(parents=True)
    (models / ".staging-half" / "model.safetensors").write_bytes(b"x")
    (models / ".staging-org--big" / "pull.json").write_text("{}")
    datasets.mkdir()
    for name in (".d.jsonl.part", "d.jsonl"):
        (datasets / name).write_text("{}")
    with staging.locked(models, "busy", None):
        clean_stages(tmp_path)
    left = {f"{path.parent.name}/{path.name}" for path in tmp_path.glob("*/*")}
    assert left == {
        "models/.staging-org--big", "models/.staging-smollm2-135m", "models/whole", "models/.staging-busy",
        "adapters/b", "datasets/d.jsonl",
    }  # fmt: skip


async def test_a_database_of_the_version_before_gets_the_table(tmp_path: Path) -> None:
    database = Database(tmp_path / FILE_NAME, MIGRATIONS[:-1])
    await database.run(lambda connection: connection.execute("SELECT count(*) FROM responses").fetchone())
    await database.close()
    async with running(tmp_path) as world:
        job = await world.submit(DONE)
        await world.until(job, "done")
    assert [row[:2] for row in rows(tmp_path)] == [(job.id, "done")]
