"""The bytes on disk never pass the budget, whoever writes, dies or deletes."""

from __future__ import annotations

import errno
import fcntl
import os
import pkgutil
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.kv import folder as kv_folder
from mlxpool.shared.kv.budget import Budget
from mlxpool.shared.kv.names import BLOCK_BYTES, FileName, file_name
from tests.tools import kv_writer
from tests.unit.kv_world import PATIENCE_S, files, on_disk

FOLDER = "ab" * 16
OTHER = "cd" * 16


def name(label: str, parent: str = "none", start: int = 0) -> FileName:
    return FileName(label.encode().ljust(16), parent.encode().ljust(16), start, start + 256, "slice")


def put(budget: Budget, file: FileName, size: int, used_s: float | None = None, folder: str = FOLDER) -> bool:
    """A record of this size; whether there was room."""
    room = budget.create(folder, size, [file.parent])
    if room.temp is None:
        return False
    os.write(room.temp.descriptor, b"x" * size)
    budget.publish(room.temp, file_name(file))
    os.close(room.temp.descriptor)
    if used_s is not None:
        os.utime(budget.root / folder / file_name(file), (used_s, used_s))
    return True


def spawn(root: Path, max_bytes: int, folder: str, how: str) -> subprocess.Popen[str]:
    argv = [sys.executable, kv_writer.__file__, str(root), str(max_bytes), folder, how]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of writing a record."""
    process = spawn(tmp_path, 200_000, OTHER, "hold")
    assert process.stdout is not None
    assert process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def test_the_number_is_what_the_files_take(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 5000)
    assert put(budget, name("b"), 1)
    assert budget.used() == on_disk(tmp_path) == 4 * BLOCK_BYTES
    assert budget.remove(tmp_path / FOLDER / file_name(name("a")))
    assert not budget.remove(tmp_path / FOLDER / file_name(name("a")))
    assert budget.used() == on_disk(tmp_path) == 2 * BLOCK_BYTES


def test_a_file_counts_in_full_before_its_first_byte(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 10 * BLOCK_BYTES)
    temp = budget.create(FOLDER, 9 * BLOCK_BYTES).temp
    assert temp is not None
    assert os.stat(temp.path).st_size == 0
    assert budget.create(FOLDER, 1).temp is None
    budget.discard(temp)
    os.close(temp.descriptor)
    assert files(tmp_path) == []
    assert put(budget, name("a"), 9 * BLOCK_BYTES)


def test_room_is_made_of_what_was_used_least_recently_by_any_model(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 11 * BLOCK_BYTES)
    for place in range(10):
        assert put(
            budget, name(f"{place}"), 100, used_s=1000 + (place * 7) % 10, folder=(FOLDER, OTHER)[place % 2]
        )
    room = budget.create(FOLDER, 2 * BLOCK_BYTES)
    assert room.temp is not None
    os.close(room.temp.descriptor)
    # Ages 0, 1 and 2 of ten: two for the need, one beyond it.
    assert [stored.file.name.strip() for stored in room.evicted] == [b"0", b"3", b"6"]
    assert [stored.folder for stored in room.evicted] == [FOLDER, OTHER, FOLDER]


def test_a_few_percent_go_at_once_so_that_the_next_writes_find_room(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 97 * BLOCK_BYTES)
    for place in range(96):
        assert put(budget, name(f"{place}"), 100, used_s=1000 + place)
    evicted = []
    for _ in range(4):
        room = budget.create(FOLDER, 100)
        assert room.temp is not None
        os.close(room.temp.descriptor)
        evicted.append(len(room.evicted))
    assert evicted == [5, 0, 0, 0]


def test_what_a_record_needs_is_not_evicted_for_it(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 5 * BLOCK_BYTES)
    path = [name(f"{place}", f"{place - 1}", place * 256) for place in range(5)]
    assert [put(budget, file, 100) for file in path] == [True] * 4 + [False]
    assert files(tmp_path) == sorted(file_name(file) for file in path[:4])


def test_a_record_larger_than_the_budget_evicts_nothing_for_nothing(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 10 * BLOCK_BYTES)
    assert put(budget, name("a"), 100)
    assert not put(budget, name("b"), 11 * BLOCK_BYTES)
    assert files(tmp_path) == [file_name(name("a"))]


def test_a_record_that_is_there_already_is_not_counted_twice(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 100)
    assert put(budget, name("a"), 100)
    assert budget.used() == on_disk(tmp_path) == 2 * BLOCK_BYTES


def test_what_a_killed_writer_had_reserved_comes_back_when_it_is_needed(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    budget = Budget(tmp_path, 20 * BLOCK_BYTES)
    assert not put(budget, name("a"), 15 * BLOCK_BYTES)
    assert len(files(tmp_path)) == 1, "the file of a living writer stays"
    holder.kill()
    holder.wait()
    assert put(budget, name("a"), 15 * BLOCK_BYTES)
    assert files(tmp_path) == [file_name(name("a"))]
    assert budget.used() == on_disk(tmp_path)


def test_a_process_of_the_same_number_is_not_taken_for_the_writer(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 10 * BLOCK_BYTES)
    temp = budget.create(FOLDER, 5 * BLOCK_BYTES).temp
    assert temp is not None
    os.close(temp.descriptor)  # as if this process had ended and another one had got its number
    assert put(budget, name("a"), 8 * BLOCK_BYTES)
    assert files(tmp_path) == [file_name(name("a"))]


@pytest.mark.parametrize("garbage", [b"", b"123", b"not a number, at all", b"9" * 100])
def test_a_ledger_that_says_nothing_is_counted_anew(tmp_path: Path, garbage: bytes) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 5000)
    (tmp_path / "ledger").write_bytes(garbage)
    assert budget.used() == 3 * BLOCK_BYTES


def test_a_ledger_that_is_too_high_mends_itself_before_anything_is_evicted(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 10 * BLOCK_BYTES)
    assert put(budget, name("a"), 100)
    with budget.locked() as ledger:
        ledger.put(10 * BLOCK_BYTES)
    assert put(budget, name("b"), 100)
    assert len(files(tmp_path)) == 2
    assert budget.used() == on_disk(tmp_path)


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of folders that can't be listed just now."""
    names: list[str] = []
    real = os.scandir

    def scandir(path: Path) -> Any:
        if Path(path).name in names:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path)

    monkeypatch.setattr("mlxpool.shared.kv.listing.os.scandir", scandir)
    return names


def test_a_folder_that_can_t_be_listed_keeps_its_part_of_the_budget(
    tmp_path: Path, unreadable: list[str]
) -> None:
    budget = Budget(tmp_path, 20 * BLOCK_BYTES)
    for place in range(12):
        assert put(budget, name(f"{place}"), BLOCK_BYTES, folder=OTHER)
    assert put(budget, name("a"), BLOCK_BYTES, used_s=1000)
    unreadable.append(OTHER)
    for place in range(12):
        assert put(budget, name(f"b{place}"), BLOCK_BYTES)
        assert on_disk(tmp_path) <= budget.used() <= budget.max_bytes
    unreadable.clear()
    assert len(files(tmp_path)) == 19, "only what could be seen made room"
    assert kv_folder.clean(tmp_path, budget.max_bytes).entries == 19
    assert budget.used() == on_disk(tmp_path)


def test_what_a_dead_writer_had_reserved_comes_back_beside_a_folder_that_can_t_be_listed(
    tmp_path: Path, unreadable: list[str]
) -> None:
    budget = Budget(tmp_path, 10 * BLOCK_BYTES)
    assert put(budget, name("a"), BLOCK_BYTES, folder=OTHER)
    temp = budget.create(FOLDER, 5 * BLOCK_BYTES).temp
    assert temp is not None
    os.close(temp.descriptor)  # as if its writer had ended
    unreadable.append(OTHER)
    assert put(budget, name("b"), 8 * BLOCK_BYTES)
    unreadable.clear()
    assert budget.used() == on_disk(tmp_path) == 10 * BLOCK_BYTES


def test_a_lost_number_is_not_made_up_while_a_folder_can_t_be_listed(
    tmp_path: Path, unreadable: list[str]
) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 5000)
    (tmp_path / "ledger").write_bytes(b"")
    unreadable.append(FOLDER)
    with pytest.raises(OSError, match="Too many open files"):
        budget.create(OTHER, 100)
    unreadable.clear()
    assert put(budget, name("b"), 100, folder=OTHER)
    assert budget.used() == on_disk(tmp_path) == 4 * BLOCK_BYTES


def test_a_lock_that_is_never_let_go_of_is_given_up(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 100)
    with (tmp_path / "ledger").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="holds the prompt cache's ledger"), budget.locked(0.01):
            pass
        assert budget.remove(tmp_path / FOLDER / file_name(name("a"))), "deleting needs no lock"
    assert budget.used() == 2 * BLOCK_BYTES, "too high, never too low"


def instead(monkeypatch: pytest.MonkeyPatch, call: str, do: Callable[[], object]) -> None:
    """Has this done once, just before that call of budget.py."""
    path = f"mlxpool.shared.kv.budget.{call}"
    real = pkgutil.resolve_name(path)
    due = [do]

    def first(*args: Any) -> Any:
        if due:
            due.pop()()
        return real(*args)

    monkeypatch.setattr(path, first)


def test_who_waited_for_a_ledger_that_was_deleted_meanwhile_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 100)

    def replace() -> None:
        (tmp_path / "ledger").unlink()
        assert put(Budget(tmp_path, 100_000), name("b"), 5000)

    instead(monkeypatch, "fcntl.flock", replace)
    assert put(budget, name("c"), 9000)
    assert budget.used() == on_disk(tmp_path) == 7 * BLOCK_BYTES


def test_two_holders_of_a_deleted_and_a_new_ledger_never_pass_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(tmp_path, 10 * BLOCK_BYTES)
    assert put(budget, name("a"), 100)

    def replace() -> None:
        (tmp_path / "ledger").unlink()
        assert put(Budget(tmp_path, 10 * BLOCK_BYTES), name("b"), 6 * BLOCK_BYTES, folder=OTHER)

    instead(monkeypatch, "temp_name", replace)
    with pytest.raises(OSError, match="ledger was deleted"):
        budget.create(FOLDER, 6 * BLOCK_BYTES)
    assert len(files(tmp_path)) == 2, "nothing is left of the one that gave up"
    assert budget.used() == on_disk(tmp_path) == 8 * BLOCK_BYTES


def test_what_changed_under_a_ledger_that_was_deleted_is_in_the_new_one(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 100)
    with budget.locked() as ledger:
        (tmp_path / "ledger").unlink()
        assert Budget(tmp_path, 100_000).used() == 2 * BLOCK_BYTES
        # As a renaming would have it that fell between two looks of the one who has counted.
        (tmp_path / FOLDER / file_name(name("b"))).write_bytes(b"x" * 5000)
        ledger.put(4 * BLOCK_BYTES)
    assert budget.used() == on_disk(tmp_path) == 4 * BLOCK_BYTES


def test_a_ledger_that_is_another_file_at_every_look_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 100)
    monkeypatch.setattr("mlxpool.shared.kv.budget.os.path.samestat", lambda *_: False)
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="another file each time"):
        budget.used()
    assert len(os.listdir("/dev/fd")) == before


def test_a_record_was_deleted_also_where_its_room_can_t_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = Budget(tmp_path, 100_000)
    assert put(budget, name("a"), 100)
    path = tmp_path / FOLDER / file_name(name("a"))

    def refuse(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("mlxpool.shared.kv.budget.os.pwrite", refuse)
        assert budget.remove(path)
    assert not path.exists()
    assert not budget.remove(path)
    assert budget.used() == 2 * BLOCK_BYTES, "too high, never too low"


def test_a_linked_folder_is_not_written_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    root = tmp_path / "kv"
    root.mkdir()
    (root / FOLDER).symlink_to(elsewhere)
    budget = Budget(root, 100_000)
    with pytest.raises(OSError, match="link"):
        budget.create(FOLDER, 100)
    assert list(elsewhere.iterdir()) == []
    assert budget.used() == BLOCK_BYTES


def test_a_file_that_can_t_be_made_takes_nothing(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 100_000)
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(OSError):
        budget.create(FOLDER, 5000)
    assert budget.used() == BLOCK_BYTES


def sample(root: Path, writers: Sequence[subprocess.Popen[str]]) -> int:
    """Bytes at one instant: who writes meanwhile would be seen in two folders at two times. When it returns
    each writer has written a record since."""
    for writer in writers:
        writer.send_signal(signal.SIGSTOP)
    for writer in writers:
        os.waitpid(writer.pid, os.WUNTRACED)
    taken = on_disk(root)
    said = [writer.stdout.fileno() for writer in writers if writer.stdout is not None]
    for descriptor in said:
        while select.select([descriptor], [], [], 0)[0]:
            assert os.read(descriptor, 65536), "the writer has ended"
    for writer in writers:
        writer.send_signal(signal.SIGCONT)
    for descriptor in said:
        assert select.select([descriptor], [], [], PATIENCE_S)[0], "the writer stands still"
    return taken


def test_two_processes_never_pass_one_budget(tmp_path: Path) -> None:
    max_bytes = 1_000_000
    writers = [spawn(tmp_path, max_bytes, folder, "on") for folder in (FOLDER, OTHER)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline()
        sampled = [sample(tmp_path, writers) for _ in range(60)]
        assert all(writer.poll() is None for writer in writers)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(PATIENCE_S)
    assert max_bytes * 0.9 < max(sampled) <= max_bytes
    assert len(set(sampled)) > 1, "the writers were at work"
    assert {path.name for path in tmp_path.iterdir()} == {FOLDER, OTHER, "ledger"}
