"""Rows and pages that hold nonsense: what they cost, and what not."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from mlxpool.parent.faults import Damaged
from mlxpool.shared.config import History
from tests.unit.test_history_store import DAY, World, found, record


@pytest.fixture
async def world(tmp_path: Path):
    world = World(tmp_path / "state.sqlite")
    await world.open()
    yield world
    await world.close()


BROKEN = {
    "input": b"\x00\x01",
    "response": b"",
    "events": b"no zlib",
}


@pytest.mark.parametrize("column", BROKEN)
async def test_a_damaged_row_costs_only_itself(world: World, column: str) -> None:
    for name in ("a", "b"):
        await world.store.put(record(name))
    world.sql(f"UPDATE responses SET {column} = ? WHERE id = 'a'", BROKEN[column])
    with pytest.raises(Damaged, match="can't be read"):
        await world.store.get("a")
    assert await found(world.store, "b") == ["b"]
    assert await world.store.put(record("c"))
    assert await world.store.delete("a")
    assert await world.store.get("a") is None


NONSENSE = {
    "created": ["x", b"x", float("inf")],
    "bytes": ["x", b"x", -(2**62), 2**63 - 1],
    "status": [b"completed", "asleep"],
    "model": [b"m"],
    "background": ["x", b"x"],
    "previous": [b"x"],
    "input": ["x", 5],
    "response": ["x", 5],
    "events": ["x", 5],
}


@pytest.mark.parametrize("column", NONSENSE)
async def test_a_column_of_another_kind_costs_its_row_alone(world: World, column: str) -> None:
    values = NONSENSE[column]
    for n in range(len(values)):
        await world.store.put(record(f"a{n}"))
    await world.store.close()
    for n, value in enumerate(values):
        world.sql(f"UPDATE responses SET {column} = ? WHERE id = ?", value, f"a{n}")
        if column == "bytes":
            assert await found(world.store, f"a{n}") == [f"a{n}"]
        else:
            with pytest.raises(Damaged, match="can't be read"):
                await world.store.get(f"a{n}")
    store = await world.restart()
    # Limits let go of it, and of nothing else in its place.
    world.limits = History(30 * DAY, 1200)
    for n in range(4):
        assert await store.put(record(f"b{n}", created=1000.0 + n))
    assert await found(store, "b2", "b3") == ["b2", "b3"]
    assert 0 < store.figures.bytes <= 1200
    for n in range(len(values)):
        await store.delete(f"a{n}")
    counted = store.figures
    assert (await world.restart()).figures == counted


async def test_a_name_that_is_no_text_is_let_go_like_any(world: World) -> None:
    await world.store.put(record("a", status="queued"))
    world.sql("UPDATE responses SET id = CAST(x'ff61' AS TEXT)")
    store = await world.restart()
    assert store.figures.entries == 1
    world.now += 31 * DAY
    assert await store.put(record("b", created=world.now))
    assert store.figures.entries == 1
    assert await found(store, "b") == ["b"]


@pytest.mark.parametrize(
    "content", [b"[", b"{}", b"5", b'{"id":"other","status":"completed"}', b"\xff"], ids=repr
)
async def test_a_row_that_holds_something_else_is_damaged(world: World, content: bytes) -> None:
    await world.store.put(record("a"))
    world.sql("UPDATE responses SET response = ? WHERE id = 'a'", zlib.compress(content))
    with pytest.raises(Damaged):
        await world.store.get("a")


async def test_damaged_pages_make_way_for_a_new_file_with_the_next_write(world: World) -> None:
    for n in range(20):
        await world.store.put(record(f"r{n}", size=5000))
    await world.close()
    content = bytearray(world.path.read_bytes())
    content[8192:] = b"\xa5" * (len(content) - 8192)
    world.path.write_bytes(content)
    world.make()
    store = await world.open()
    assert await store.put(record("new"))
    assert await found(store, "new") == ["new"]
    assert (await world.restart()).figures.entries == 1
    assert len(list(world.path.parent.glob("*.unusable-*"))) == 1
