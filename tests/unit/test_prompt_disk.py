"""The prompt cache's folder as the parent looks at it: within its budget, and never waited for too long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpool.parent import prompt_disk
from mlxpool.parent.prompt_disk import PromptDisk
from mlxpool.shared.config import Cache
from mlxpool.shared.kv import folder
from mlxpool.shared.kv.budget import Budget
from tests.tools.kv_records import fingerprint, held_bytes, write_record


class HungDisk:
    """A disk that answers nothing until it is let."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0
        self._scan = folder.scan

    def scan(self, root: Path) -> list[folder.FolderUse]:
        self.asked += 1
        self.answers.wait(60)
        return self._scan(root)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    disk = HungDisk()
    monkeypatch.setattr(folder, "scan", disk.scan)
    yield disk
    disk.answers.set()


def disk_of(root: Path, **cache: object) -> PromptDisk:
    return PromptDisk(root, Cache(**cache), lambda: None)  # type: ignore[arg-type]


async def test_what_each_model_has(tmp_path: Path) -> None:
    first = write_record(tmp_path, fingerprint("a"), "one", 1, used_s=100.0)
    second = write_record(tmp_path, fingerprint("b"), "two", 2, used_s=200.0)
    disk = disk_of(tmp_path)
    await disk.look()
    assert [(use.model, use.bytes) for use in disk.folders] == [
        ("two", held_bytes(second)),
        ("one", held_bytes(first)),
    ]
    assert (disk.bytes, disk.entries) == (held_bytes(first, second), 2)
    second.unlink()
    await disk.look()
    assert (disk.bytes, disk.entries) == (held_bytes(first), 1)


async def test_who_looks_while_somebody_else_does_sees_what_was_there_when_he_asked(tmp_path: Path) -> None:
    write_record(tmp_path, fingerprint("a"), "one", 1)
    disk = disk_of(tmp_path)
    early = asyncio.create_task(disk.look())
    await asyncio.sleep(0)
    write_record(tmp_path, fingerprint("a"), "one", 2)
    await asyncio.gather(*(disk.look() for _ in range(5)))
    assert disk.entries == 2
    await early


async def test_many_who_look_at_once_share_a_look(tmp_path: Path, hung: HungDisk) -> None:
    disk = disk_of(tmp_path)
    looks = [asyncio.create_task(disk.look()) for _ in range(20)]
    await asyncio.sleep(0)
    hung.answers.set()
    await asyncio.gather(*looks)
    assert hung.asked <= 2


async def test_a_disk_that_hangs_is_waited_for_once_and_no_longer_than_a_request_may(
    tmp_path: Path, hung: HungDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_disk, "LOOK_LIMIT_S", 0.05)
    record = write_record(tmp_path, fingerprint("a"), "one")
    disk = disk_of(tmp_path)
    begun = time.monotonic()
    for _ in range(3):
        await disk.look()
    assert time.monotonic() - begun < 2
    assert (disk.bytes, hung.asked) == (0, 1)
    hung.answers.set()
    monkeypatch.setattr(prompt_disk, "LOOK_LIMIT_S", 5.0)
    await disk.look()
    assert disk.bytes == held_bytes(record)


def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path: Path, hung: HungDisk) -> None:
    async def serve() -> None:
        watch = asyncio.create_task(disk_of(tmp_path).watch())
        await asyncio.sleep(0)  # the look is under way
        watch.cancel()

    begun = time.monotonic()
    asyncio.run(serve())
    assert time.monotonic() - begun < 2


async def test_whoever_holds_the_ledger_does_not_hold_up_a_look(tmp_path: Path) -> None:
    record = write_record(tmp_path, fingerprint("a"), "one")
    disk = disk_of(tmp_path)
    with Budget(tmp_path, 1).locked():
        begun = time.monotonic()
        await disk.look()
        assert time.monotonic() - begun < 1
    assert disk.bytes == held_bytes(record)


async def test_a_lowered_budget_is_kept_least_recently_used_out_first(tmp_path: Path) -> None:
    old = write_record(tmp_path, fingerprint("a"), "one", 1, data_bytes=50_000, used_s=100.0)
    new = write_record(tmp_path, fingerprint("b"), "two", 2, data_bytes=50_000, used_s=200.0)
    disk = disk_of(tmp_path)
    await disk.look()
    assert old.exists()
    disk.use(Cache(ssd_budget=80_000))
    await disk.look()
    assert not old.exists()
    assert new.exists()
    assert disk.bytes == held_bytes(new)


async def test_what_is_there_stays_while_nothing_is_kept_on_disk(tmp_path: Path) -> None:
    record = write_record(tmp_path, fingerprint("a"), "one")
    disk = disk_of(tmp_path, ssd=False, ssd_budget=0)
    await disk.look()
    assert record.exists()


async def test_what_is_over_the_budget_and_can_not_go_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def clean(root: Path, max_bytes: int) -> folder.Cleaned:
        tried.append(max_bytes)
        return folder.Cleaned(0, 0, 0, 1, 4096)

    monkeypatch.setattr(folder, "clean", clean)
    write_record(tmp_path, fingerprint("a"), "one", 1)
    disk = disk_of(tmp_path, ssd_budget=1000)
    for _ in range(3):
        await disk.look()
    assert tried == [1000]
    write_record(tmp_path, fingerprint("a"), "one", 2)
    await disk.look()
    assert tried == [1000, 1000]


async def test_a_folder_that_can_not_be_read_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan(root: Path) -> list[folder.FolderUse]:
        raise OSError(5, "Input/output error")

    disk = disk_of(tmp_path)
    monkeypatch.setattr(folder, "scan", scan)
    await disk.look()
    assert (disk.bytes, list(disk.folders)) == (0, [])


async def test_the_watch_looks_again_when_told_that_something_is_different(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_disk, "LOOK_INTERVAL_S", 60.0)
    looked = asyncio.Event()
    disk = PromptDisk(tmp_path, Cache(), looked.set)
    watch = asyncio.create_task(disk.watch())
    async with asyncio.timeout(60):
        await looked.wait()
        record = write_record(tmp_path, fingerprint("a"), "one")
        looked.clear()
        disk.look_soon()
        await looked.wait()
    assert disk.bytes == held_bytes(record)
    watch.cancel()
