"""What is kept of answers, for how long, and what a file or disk that refuses costs."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
import threading
from functools import partial
from pathlib import Path

import msgspec
import pytest

from mlxpool.parent import database as database_module
from mlxpool.parent.database import Database
from mlxpool.parent.faults import Damaged, Unavailable
from mlxpool.parent.history import records, table
from mlxpool.parent.history import store as module
from mlxpool.parent.history.records import ROW_BYTES, Record, of_response
from mlxpool.parent.history.store import HistoryStore
from mlxpool.parent.history.table import MIGRATIONS
from mlxpool.shared.config import History

DAY = 86400.0


def record(name: str, created: float = 1000.0, status: str = "completed", size: int = 0, **more) -> Record:
    response = {
        "id": name,
        "status": status,
        "model": "m",
        "output": [{"id": f"msg_{name}", "type": "message"}],
    }
    # Noise: what does not shrink is counted as it is.
    noise = random.Random(name).randbytes(size // 2).hex()
    given = msgspec.json.encode([{"role": "user", "content": noise}])
    return of_response(
        msgspec.json.encode(response), created, given, background=False, previous=None, events=None, **more
    )


class World:
    """A store over a file, with a clock and limits that a test moves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 1000.0
        self.limits = History(30 * DAY, 10**9)
        self.make()

    def make(self) -> None:
        self.database = Database(self.path, MIGRATIONS)
        self.store = HistoryStore(self.database, lambda: self.limits, lambda: self.now)

    async def open(self) -> HistoryStore:
        await self.store.open(lambda left: msgspec.structs.replace(left, status="failed"))
        return self.store

    async def close(self) -> None:
        await self.store.close()
        await self.database.close()

    async def restart(self) -> HistoryStore:
        await self.close()
        self.make()
        return await self.open()

    def sql(self, statement: str, *values: object) -> None:
        connection = sqlite3.connect(self.path)
        connection.execute(statement, values)
        connection.commit()
        connection.close()


@pytest.fixture
async def world(tmp_path: Path):
    world = World(tmp_path / "state.sqlite")
    await world.open()
    yield world
    await world.close()


async def settled(store: HistoryStore) -> None:
    """Once everything is in order: a store that closes leaves what can wait."""
    while store._working is not None:
        await store._working


async def found(store: HistoryStore, *names: str) -> list[str]:
    return [name for name in names if await store.get(name) is not None]


async def test_a_record_comes_back_as_it_was_also_after_a_restart(world: World) -> None:
    told = of_response(
        b'{"id": "r", "status": "incomplete", "model": "m", "output": [{"id": "msg_1"}, {"id": ""}]}',
        1000.0,
        b'[ {"a":1}]',
        background=True,
        previous="r0",
        events=(b"event: x\n\n", b"event: y\n\n"),
    )
    assert await world.store.put(told)
    store = await world.restart()
    events = (b"event: x\n\nevent: y\n\n",)
    assert await store.get("r") == msgspec.structs.replace(told, items=(), events=events)
    assert told.items == ("msg_1",)
    assert (await store.holder_of("msg_1")).id == "r"
    assert await store.holder_of("msg_2") is None
    assert await store.get("r1") is None


async def test_what_is_kept_is_found_before_it_is_written(world: World) -> None:
    kept = record("r")
    world.store.keep(kept)
    assert await world.store.get("r") is kept
    assert (await world.store.holder_of("msg_r")) is kept
    world.store.write(kept)
    assert (await world.store.get("r")).response == kept.response
    store = await world.restart()
    assert (await store.get("r")).response == kept.response


async def test_many_writes_at_once_are_all_there_and_counted(world: World) -> None:
    for n in range(100):
        one = record(f"r{n}")
        world.store.keep(one)
        world.store.write(one)
    await world.store.close()
    assert world.store.figures.entries == 100
    assert world.store.figures.bytes > 100 * ROW_BYTES
    before = world.store.figures
    store = await world.restart()
    assert store.figures == before


async def test_a_deleted_record_is_gone_whether_it_was_written_is_being_or_was_not(world: World) -> None:
    written, waiting, kept = record("written"), record("waiting"), record("kept")
    await world.store.put(written)
    for one in (waiting, kept):
        world.store.keep(one)
    world.store.write(waiting)
    assert [await world.store.delete(name) for name in ("written", "waiting", "kept", "unknown")] == [
        True,
        True,
        True,
        False,
    ]
    world.store.write(kept)
    store = await world.restart()
    assert await found(store, "written", "waiting", "kept") == []
    assert (store.figures.entries, store.figures.bytes) == (0, 0)
    assert await store.holder_of("msg_written") is None


async def test_a_record_that_is_put_again_replaces_what_was_there(world: World) -> None:
    await world.store.put(record("r", status="queued"))
    await world.store.put(record("r", status="completed", size=3000))
    assert (await world.store.get("r")).status == "completed"
    assert world.store.figures.entries == 1
    before = world.store.figures
    assert (await world.restart()).figures == before


async def test_the_oldest_make_room_for_the_newest(world: World) -> None:
    world.limits = History(30 * DAY, 20_000)
    names = [f"r{n}" for n in range(10)]
    for n, name in enumerate(names):
        await world.store.put(record(name, created=900.0 + n, size=6000))
        assert world.store.figures.bytes <= 20_000
    left = await found(world.store, *names)
    assert left == names[-len(left) :]
    assert 2 <= len(left) < 10


async def test_a_lower_limit_counts_from_the_next_start_and_lets_many_go(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "EVICTED_AT_ONCE", 3)
    for n in range(20):
        await world.store.put(record(f"r{n + 10}", created=900.0 + n))
    size = world.store.figures.bytes
    world.limits = History(30 * DAY, size // 4)
    store = await world.restart()
    assert store.figures.entries == 5
    assert await found(store, *(f"r{n}" for n in range(10, 30))) == [f"r{n}" for n in range(25, 30)]


async def test_the_file_gives_back_what_was_let_go(world: World) -> None:
    # More than one transaction gives back.
    size = 6 * database_module.VACUUM_PAGES * 4096
    await world.store.put(record("r", size=2 * size))
    assert world.path.stat().st_size > size
    await world.store.delete("r")
    await settled(world.store)
    assert world.path.stat().st_size < 100_000


async def test_history_that_is_switched_off_forgets_all_there_was(world: World) -> None:
    for name in ("a", "b"):
        await world.store.put(record(name))
    world.limits = History(30 * DAY, 0)
    assert await world.store.get("a") is None
    assert await world.store.holder_of("msg_a") is None
    world.store.limits_changed()
    await world.store.close()
    assert (world.store.figures.entries, world.store.figures.bytes) == (0, 0)
    world.limits = History(30 * DAY, 10**9)
    assert await found(world.store, "a", "b") == []


async def test_lower_limits_count_when_they_are_told(world: World) -> None:
    for n in range(4):
        await world.store.put(record(f"r{n}", created=900.0 + n))
    world.limits = History(99.0, world.store.figures.bytes)
    world.store.limits_changed()
    await world.store.close()
    assert world.store.figures.entries == 2
    assert await found(world.store, "r0", "r1", "r2", "r3") == ["r2", "r3"]


async def test_what_is_let_go_at_once_is_bounded_in_rows_and_bytes(world: World) -> None:
    for name, size in (("a", 30_000), ("b", 30_000), ("c", 30_000), ("d", 0)):
        await world.store.put(record(name, size=size))
    await world.store.close()
    let_go = partial(world.store._table.trim, 2000.0, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "EVICTED_BYTES", 20_000)
        assert await world.store._changed(let_go)
        assert world.store.figures.entries == 2
        patch.setattr(table, "EVICTED_AT_ONCE", 1)
        assert await world.store._changed(let_go)
        assert world.store.figures.entries == 1
    assert not await world.store._changed(let_go)
    assert world.store.figures.entries == 0


async def test_what_is_too_old_is_unknown_at_once_and_gone_with_the_next_write(world: World) -> None:
    await world.store.put(record("old", created=1000.0))
    await world.store.close()
    world.now += 30 * DAY
    assert await found(world.store, "old") == []
    assert world.store.figures.entries == 1
    await world.store.put(record("new", created=world.now))
    assert world.store.figures.entries == 1
    assert await found(world.store, "new") == ["new"]


async def test_never_is_an_age_too(world: World) -> None:
    world.limits = History(float("inf"), 10**9)
    await world.store.put(record("r", created=0.0))
    world.now = 1e12
    assert await found(await world.restart(), "r") == ["r"]


async def test_a_file_that_is_taken_away_takes_its_sizes_along(world: World) -> None:
    for n in range(5):
        await world.store.put(record(f"a{n}", size=10_000))
    world.limits = History(30 * DAY, world.store.figures.bytes + 500)
    world.path.unlink()
    for n in range(5):
        await world.store.put(record(f"b{n}", size=10_000))
    assert await found(world.store, *(f"b{n}" for n in range(5))) == [f"b{n}" for n in range(5)]
    figures = world.store.figures
    assert figures.entries == 5
    assert (await world.restart()).figures == figures


async def test_events_are_left_unread_where_nobody_wants_them(world: World) -> None:
    told = record("r")
    await world.store.put(msgspec.structs.replace(told, events=(b"event: x\n\n",)))
    assert (await world.store.get("r")).events == (b"event: x\n\n",)
    world.sql("UPDATE responses SET events = 'no zlib'")
    bare = msgspec.structs.replace(told, items=())
    assert await world.store.get("r", events=False) == bare
    assert await world.store.holder_of("msg_r") == bare
    with pytest.raises(Damaged):
        await world.store.get("r")


async def test_what_was_to_go_on_at_a_restart_is_told_to_have_failed(world: World) -> None:
    for name, status in (("q", "queued"), ("p", "in_progress"), ("done", "completed")):
        await world.store.put(record(name, status=status))
    store = await world.restart()
    assert [(await store.get(name)).status for name in ("q", "p", "done")] == [
        "failed",
        "failed",
        "completed",
    ]


async def test_a_locked_file_costs_the_record_and_is_told_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await world.close()
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.01)
    world.make()
    await world.open()
    other = sqlite3.connect(world.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    caplog.set_level(logging.INFO, "mlxpool.history")
    assert not await world.store.put(record("a"))
    waiting = record("b")
    world.store.keep(waiting)
    world.store.write(waiting)
    await world.store.close()
    assert world.store.figures.unstored == 2
    assert "locked" in (world.store.figures.reason or "")
    assert [entry.levelname for entry in caplog.records] == ["ERROR"]
    other.execute("ROLLBACK")
    other.close()
    assert await world.store.put(record("c"))
    assert world.store.figures.reason is None
    assert await found(world.store, "a", "b", "c") == ["c"]
    assert world.store.figures.entries == 1


async def test_a_full_disk_costs_the_record_and_nothing_that_was_there(world: World) -> None:
    await world.store.put(record("a"))
    (pages,) = await world.database.run(lambda c: c.execute("PRAGMA page_count").fetchone())

    def fill(connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA max_page_count = {pages + 1}")

    await world.database.run(fill)
    before = world.store.figures.bytes
    assert not await world.store.put(record("b", size=50_000))
    assert "full" in (world.store.figures.reason or "")
    assert await found(world.store, "a", "b") == ["a"]
    # What was counted in vain is not counted: room is made for what fits.
    assert await world.store.delete("a")
    assert await world.store.put(record("a"))
    assert world.store.figures.bytes == before


async def test_what_was_rolled_back_with_others_is_not_counted(world: World) -> None:
    await world.store.put(record("a"))
    (pages,) = await world.database.run(lambda c: c.execute("PRAGMA page_count").fetchone())
    await world.database.run(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 2}") and None)
    for one in (record("small"), record("big", size=50_000)):
        world.store.keep(one)
        world.store.write(one)
    await world.store.close()
    assert world.store.figures.unstored == 2
    assert await world.store.put(record("b"))
    counted = world.store.figures
    assert counted.entries == 2
    assert (await world.restart()).figures.bytes == counted.bytes


async def test_what_is_rolled_back_is_not_counted_whatever_runs_beside_it(world: World) -> None:
    await world.store.put(record("a"))
    before = world.store.figures
    (pages,) = await world.database.run(lambda c: c.execute("PRAGMA page_count").fetchone())
    await world.database.run(lambda c: c.execute(f"PRAGMA max_page_count = {pages + 5}") and None)
    big = [record(f"small{n}") for n in range(3)] + [record("big", size=100_000)]
    rows = [(one, records.pack(one)) for one in big]
    changes = [world.store._changed(partial(world.store._table.insert, rows)) for _ in range(3)]
    others = [world.store._changed(partial(world.store._table.delete, "none")) for _ in range(3)]
    mixed = [one for pair in zip(others, changes, strict=True) for one in pair]
    done = await asyncio.gather(*mixed, return_exceptions=True)
    assert [type(one) for one in done] == [bool, Unavailable] * 3
    await world.store.delete("none")
    assert world.store.figures.entries == before.entries
    assert world.store.figures.bytes == before.bytes


async def test_a_record_that_can_not_be_packed_is_counted_and_held_up_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = records.pack

    def failing(one: Record) -> records.Packed:
        if one.id == "bad":
            raise MemoryError("no room")
        return pack(one)

    monkeypatch.setattr(records, "pack", failing)
    for name in ("bad", "good"):
        one = record(name)
        world.store.keep(one)
        world.store.write(one)
        await world.store.close()
    assert await found(world.store, "bad", "good") == ["good"]
    assert world.store.figures.unstored == 1
    assert world.store._fresh == {}


async def test_a_delete_that_the_file_refuses_deletes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.close()
    monkeypatch.setattr(database_module, "BUSY_TIMEOUT_S", 0.01)
    world.make()
    await world.open()
    stored, kept = record("stored"), record("kept")
    await world.store.put(stored)
    world.store.keep(kept)
    other = sqlite3.connect(world.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for name in ("stored", "kept"):
        with pytest.raises(Unavailable, match="locked"):
            await world.store.delete(name)
    other.close()
    assert await world.store.get("kept") is kept
    world.store.write(kept)
    store = await world.restart()
    assert await found(store, "stored", "kept") == ["stored", "kept"]


async def test_a_record_that_is_deleted_while_it_is_packed_does_not_come_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing, go_on = threading.Event(), threading.Event()
    pack = records.pack

    def slow(one: Record) -> records.Packed:
        packing.set()
        go_on.wait(60)
        return pack(one)

    monkeypatch.setattr(records, "pack", slow)
    one = record("r")
    world.store.keep(one)
    world.store.write(one)
    await asyncio.to_thread(packing.wait, 10)
    assert await world.store.delete("r")
    go_on.set()
    await world.store.close()
    assert await world.store.get("r") is None


async def test_a_record_longer_than_the_limit_is_not_stored_and_lets_none_go(world: World) -> None:
    await world.store.put(record("a"))
    world.limits = History(30 * DAY, 2000)
    assert not await world.store.put(record("long", size=50_000))
    assert await found(world.store, "a", "long") == ["a"]
    assert "history.max_bytes" in (world.store.figures.reason or "")


async def test_records_that_wait_for_a_slow_disk_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_BYTES", 10_000)
    release = asyncio.Event()

    async def slow(*work):
        await release.wait()
        return await Database.run(world.database, *work)

    monkeypatch.setattr(world.database, "run", slow)
    for n in range(6):
        one = record(f"r{n}", size=4000)
        world.store.keep(one)
        world.store.write(one)
    assert world.store.figures.unstored == 4
    release.set()
    await world.store.close()
    assert await found(world.store, *(f"r{n}" for n in range(6))) == ["r0", "r1"]


async def test_limits_that_change_while_the_file_is_put_in_order_count_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.store.put(record("a"))
    await world.store.close()
    shrink, told = world.store._shrink, []

    async def shrunk() -> bool:
        if not told:
            told.append(True)
            world.limits = History(30 * DAY, 0)
            world.store.limits_changed()
        return await shrink()

    monkeypatch.setattr(world.store, "_shrink", shrunk)
    world.store.limits_changed()
    await settled(world.store)
    assert told
    assert world.store.figures.entries == 0
