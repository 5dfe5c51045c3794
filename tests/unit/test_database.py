"""The file of what the parent remembers: what it survives, and what makes way for a new one."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mlxpool.parent import database as module
from mlxpool.parent.database import Database
from mlxpool.parent.faults import Damaged, Unavailable

NOTES = (("CREATE TABLE notes (text TEXT)",),)


def add(text: str):
    return lambda connection: connection.execute("INSERT INTO notes VALUES (?)", (text,)) and None


def texts(connection: sqlite3.Connection) -> list[str]:
    return [row[0] for row in connection.execute("SELECT text FROM notes ORDER BY rowid")]


def beside(path: Path, pattern: str) -> list[Path]:
    return list(path.parent.glob(path.name + pattern))


async def opened(path: Path, *texts_to_add: str, migrations: tuple[tuple[str, ...], ...] = NOTES) -> Database:
    database = Database(path, migrations)
    for text in texts_to_add:
        await database.run(add(text))
    return database


async def test_what_was_written_is_there_after_a_restart_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    await (await opened(path, "a", "b")).close()
    again = await opened(path)
    assert await again.run(texts) == ["a", "b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert beside(path, ".unusable-*") == []
    await again.close()


async def test_work_that_fails_leaves_nothing_of_itself(tmp_path: Path) -> None:
    database = await opened(tmp_path / "state.sqlite", "before")

    def half(connection: sqlite3.Connection) -> None:
        add("half")(connection)
        connection.execute("INSERT INTO nowhere VALUES (1)")

    with pytest.raises(Unavailable, match="nowhere"):
        await database.run(half)
    assert await database.run(texts) == ["before"]
    await database.close()


async def test_work_whose_own_code_fails_leaves_nothing_either(tmp_path: Path) -> None:
    database = await opened(tmp_path / "state.sqlite")

    def half(connection: sqlite3.Connection) -> None:
        add("half")(connection)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await database.run(half)
    await database.run(add("next"))
    assert await database.run(texts) == ["next"]
    await database.close()


async def test_a_file_of_an_earlier_layout_is_brought_up_to_date_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    await (await opened(path, "old")).close()
    later = (*NOTES, ("ALTER TABLE notes ADD COLUMN mark TEXT DEFAULT 'new'",))
    database = await opened(path, migrations=later)
    assert await database.run(lambda c: c.execute("SELECT text, mark FROM notes").fetchall()) == [
        ("old", "new")
    ]
    await database.close()


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()


def of_a_later_version(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA application_id = {module.APPLICATION_ID}")
    connection.execute("PRAGMA user_version = 2")
    connection.close()


UNUSABLE = {
    "garbage": lambda path: path.write_bytes(b"no database at all" * 300),
    "a torn header": lambda path: path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 5000),
    "foreign": foreign,
    "of a later version": of_a_later_version,
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("make", UNUSABLE.values(), ids=list(UNUSABLE))
async def test_an_unusable_file_is_moved_aside_whole_and_a_new_one_begun(tmp_path: Path, make) -> None:
    path = tmp_path / "state.sqlite"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    database = await opened(path, "new")
    assert await database.run(texts) == ["new"]
    (aside,) = beside(path, ".unusable-*")
    assert aside.name.startswith("state.sqlite.unusable-")
    assert before is None or aside.read_bytes() == before
    await database.close()


async def test_two_files_set_aside_in_one_second_do_not_overwrite_each_other(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    for content in (b"first " * 1000, b"second " * 1000):
        path.write_bytes(content)
        await (await opened(path, "x")).close()
        path.unlink()
    assert sorted(p.read_bytes()[:5] for p in beside(path, ".unusable-*")) == [
        b"first",
        b"secon",
    ]


async def test_damaged_pages_are_told_from_a_file_that_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    await (await opened(path, *("x" * 3000 for _ in range(20)))).close()
    whole = bytearray(path.read_bytes())
    whole[4096:] = b"\xa5" * (len(whole) - 4096)
    path.write_bytes(whole)
    database = await opened(path)
    with pytest.raises(Damaged):
        await database.run(texts)
    await database.begin_anew()
    await database.run(add("new"))
    assert await database.run(texts) == ["new"]
    assert len(beside(path, ".unusable-*")) == 1
    await database.close()


async def test_a_locked_file_is_unavailable_and_serves_again_when_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_TIMEOUT_S", 0.01)
    path = tmp_path / "state.sqlite"
    database = await opened(path, "a")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked"):
        await database.run(add("b"))
    other.execute("ROLLBACK")
    await database.run(add("c"))
    assert await database.run(texts) == ["a", "c"]
    other.close()
    await database.close()


async def test_a_locked_file_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    database = await opened(path, "a")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert await database.read(texts) == ["a"]
    other.close()
    await database.close()


async def test_nobody_else_writes_between_what_a_change_reads_and_what_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    database = await opened(path, "a")
    other = sqlite3.connect(path, isolation_level=None, timeout=0.0, check_same_thread=False)

    def count_on(connection: sqlite3.Connection) -> None:
        count = len(texts(connection))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            add("theirs")(other)
        add(f"after {count}")(connection)

    await database.run(count_on)
    add("theirs")(other)
    assert await database.read(texts) == ["a", "after 1", "theirs"]
    other.close()
    await database.close()


async def test_what_follows_a_commit_follows_no_other_end(tmp_path: Path) -> None:
    database = await opened(tmp_path / "state.sqlite")
    told: list[str] = []
    await database.run(add("a"), lambda: told.append("a"))
    with pytest.raises(Unavailable):
        await database.run(lambda c: c.execute("SELECT 1 FROM nowhere") and None, lambda: told.append("b"))
    assert told == ["a"]
    await database.close()


async def test_a_large_write_does_not_keep_its_log_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    database = await opened(path, "x" * 3 * module.JOURNAL_BYTES, "y")
    assert beside(path, "-wal")[0].stat().st_size <= module.JOURNAL_BYTES
    await database.close()


async def test_text_that_is_none_is_read_as_far_as_it_can_be(tmp_path: Path) -> None:
    database = await opened(tmp_path / "state.sqlite", "a")
    await database.run(lambda c: c.execute("INSERT INTO notes VALUES (CAST(x'62ff' AS TEXT))") and None)
    assert await database.read(texts) == ["a", "b\ufffd"]
    await database.close()


async def test_a_file_that_was_taken_away_under_the_server_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    database = await opened(path, "a")
    for file in beside(path, "*"):
        file.unlink()
    await database.run(add("b"))
    await database.close()
    again = await opened(path)
    assert await again.run(texts) == ["b"]
    await again.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
async def test_a_home_that_can_not_be_written_makes_it_unavailable(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    with pytest.raises(Unavailable, match="state.sqlite"):
        await opened(home / "state.sqlite", "a")


async def test_what_was_committed_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    code = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.unit.test_database import add, opened\n"
        "async def main():\n"
        "    database = await opened(Path(sys.argv[1]), *map(str, range(50)))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(path), cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL
    )
    assert await process.wait() == -9
    database = await opened(path)
    assert await database.run(texts) == [str(n) for n in range(50)]
    await database.close()


async def test_a_file_that_gives_no_pages_back_is_not_asked_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    database = await opened(path, *("x" * 4000 for _ in range(400)))
    await database.close()
    with sqlite3.connect(path) as rebuilt:
        rebuilt.execute("PRAGMA auto_vacuum = 0")
    rebuilt.execute("VACUUM")
    rebuilt.close()
    database = await opened(path)
    await database.run(lambda connection: connection.execute("DELETE FROM notes") and None)
    async with asyncio.timeout(60):
        while await database.run(module.give_back):
            pass
    await database.close()


async def test_all_free_pages_are_given_back_a_few_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    database = await opened(path, *("x" * 4000 for _ in range(3 * module.VACUUM_PAGES)))
    await database.run(lambda connection: connection.execute("DELETE FROM notes") and None)
    calls = 1
    while await database.run(module.give_back):
        calls += 1
    assert calls >= 3
    await database.close()
    assert path.stat().st_size < 100_000
