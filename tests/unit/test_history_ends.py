"""Responses that have a row before they have an end: what they are told to be when that end never came."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from mlxpool.parent import database as database_module
from mlxpool.parent.history import store as module
from mlxpool.parent.history.records import failed
from mlxpool.shared.config import History
from mlxpool.shared.errors import error
from tests.unit.test_history_store import DAY, World, record

RESTARTED = "the server was restarted"


class Ends(World):
    """Whose runs that nobody goes on with say that the server was restarted."""

    async def open(self):
        await self.store.open(lambda left: failed(left, error("shutting_down", RESTARTED)))
        return self.store

    def row(self, name: str) -> str | None:
        """The status that the file has."""
        connection = sqlite3.connect(self.path)
        row = connection.execute("SELECT status FROM responses WHERE id = ?", (name,)).fetchone()
        connection.close()
        return None if row is None else row[0]

    async def told(self, name: str) -> tuple[str, str]:
        """What a poll hears: the status, and why it failed."""
        found = await self.store.get(name)
        assert found is not None
        response = msgspec.json.decode(found.response)
        assert response["status"] == found.status
        return found.status, (response.get("error") or {}).get("message", "")

    async def ends(self, name: str, **more) -> None:
        """A run's end is handed in, and written or not."""
        final = record(name, **more)
        self.store.keep(final)
        self.store.write(final)
        await self.store.close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        other = sqlite3.connect(self.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")
        other.close()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.01)
    world = Ends(tmp_path / "state.sqlite")
    await world.open()
    yield world
    await world.close()


async def test_an_end_longer_than_the_limit_is_told_to_have_failed_for_it(world: Ends) -> None:
    world.limits = History(30 * DAY, 3000)
    await world.store.put(record("r", status="queued"))
    await world.ends("r", size=20_000)
    status, why = await world.told("r")
    assert status == "failed"
    assert "longer than history.max_bytes (3000)" in why
    assert world.row("r") == "failed"
    assert world.store.figures.unstored == 1
    await world.restart()
    assert await world.told("r") == (status, why)


async def test_an_end_that_a_locked_file_cost_is_told_at_once_and_written_with_the_next(world: Ends) -> None:
    await world.store.put(record("r", status="queued"))
    with world.locked():
        await world.ends("r")
        status, why = await world.told("r")
        assert status == "failed"
        assert "database is locked" in why
        assert world.row("r") == "queued"
    await world.store.put(record("next"))
    await world.store.close()
    assert world.row("r") == "failed"
    assert await world.told("r") == (status, why)
    assert world.store.figures.entries == 2


async def test_an_end_that_waited_for_a_slow_disk_in_vain_is_told_to_have_failed(
    world: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.store.put(record("r", status="in_progress"))
    monkeypatch.setattr(module, "WAITING_BYTES", 10_000)
    world.store.keep(record("other", size=20_000))
    await world.ends("r")
    status, why = await world.told("r")
    assert status == "failed"
    assert "the disk is slower" in why
    assert world.row("r") == "failed"


async def test_what_a_predecessor_left_in_a_locked_file_is_failed_at_once_and_ended_later(
    world: Ends,
) -> None:
    await world.store.put(record("old", status="queued"))
    await world.close()
    world.make()
    with world.locked():
        await world.open()
        assert await world.told("old") == ("failed", RESTARTED)
        assert world.row("old") == "queued"
        assert world.store.figures.entries == 1
        assert world.store.figures.unstored == 0
    await world.store.put(record("new", status="queued"))
    await world.store.close()
    assert world.row("old") == "failed"
    # This one goes on.
    assert world.row("new") == "queued"
    await world.ends("new")
    assert await world.told("new") == ("completed", "")


async def test_a_run_that_was_given_up_while_its_row_was_written_is_not_left_queued(
    world: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    insert = module.Table.insert

    def slow(*args) -> None:
        writing.set()
        go_on.wait(60)
        insert(*args)

    monkeypatch.setattr(module.Table, "insert", slow)
    putting = asyncio.create_task(world.store.put(record("r", status="queued")))
    await asyncio.to_thread(writing.wait, 10)
    putting.cancel()
    await asyncio.wait([putting])
    go_on.set()
    assert await world.told("r") == ("failed", RESTARTED)
    await world.store.put(record("next"))
    await world.store.close()
    assert world.row("r") == "failed"


async def test_a_response_that_ended_or_was_deleted_meanwhile_is_not_ended_again(world: Ends) -> None:
    await world.store.put(record("r", status="queued"))
    left = await world.store.get("r")
    assert left is not None
    await world.ends("r")
    ended = failed(left, error("shutting_down", RESTARTED))
    for name in ("r", "unknown"):
        again = msgspec.structs.replace(ended, id=name)
        packed = module.records.pack(again)
        await world.database.run(lambda c, a=again, p=packed: module.Table().end(a, p, c))
    assert await world.told("r") == ("completed", "")
    assert world.row("unknown") is None
