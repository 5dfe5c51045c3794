"""No fault of a disk, and no end of a writer, is anybody's but its own: writing goes off, nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.kv import folder as kv_folder
from mlxpool.worker.cache import ssd_writing
from mlxpool.worker.cache.writer import RETRY_S, Writer
from tests.tools import kv_dying
from tests.unit.kv_world import (
    MARK,
    PATIENCE_S,
    PLENTY,
    Held,
    Restore,
    chain,
    files,
    on_disk,
    open_tier,
    slices,
    tokens,
    waiting,
    write,
)

CALLS = [
    ("mkdir", "pathlib.Path.mkdir"),
    ("open", "mlxpool.shared.kv.budget.os.open"),
    ("lock", "mlxpool.shared.kv.budget.fcntl.flock"),
    ("read the ledger", "mlxpool.shared.kv.budget.os.pread"),
    ("write the ledger", "mlxpool.shared.kv.budget.os.pwrite"),
    ("write", "mlxpool.worker.cache.ssd_writing.os.pwritev"),
    ("describe", "mlxpool.shared.kv.folder.os.write"),
    ("rename", "mlxpool.shared.kv.budget.os.rename"),
    ("list", "mlxpool.shared.kv.listing.os.scandir"),
]


class Failing:
    """Puts itself in the place of a call and fails the one of a given number."""

    def __init__(self, real: Any, at: int) -> None:
        self.real, self.at, self.count = real, at, 0

    @property
    def call(self) -> Any:
        """A plain function: in a class it is a method, as what it replaces may be."""

        def call(*args: Any, **more: Any) -> Any:
            self.count += not self.spared(*args)
            if self.count == self.at:
                self.at = -1
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.real(*args, **more)

        return call

    def spared(self, *args: Any) -> bool:
        """Letting go of a lock is repeated by the closing that follows; a full disk refuses no reading."""
        name = self.real.__name__
        return (name == "flock" and args[1] == fcntl.LOCK_UN) or (name == "open" and not args[1] & os.O_CREAT)


def fails_at(call: str, at: int, root: Path, fresh: bool, monkeypatch: pytest.MonkeyPatch) -> bool | None:
    """One record written while the call of this number fails; whether writing was then off, as it must be, or
    None where there is no such call."""
    tier = open_tier(root)
    before = slices(1)[0]
    if not fresh:
        write(tier, [before])
    item = waiting(*chain(tokens(256, 5000))[0])
    now, said = [0.0], []
    writer = Writer(tier, PLENTY, lambda: False, lambda _, durable: said.append(durable), lambda: now[0])
    with monkeypatch.context() as patched:
        failing = Failing(pkgutil.resolve_name(call), at)
        patched.setattr(call, failing.call)
        writer.offer(item)
        writer.flush(PATIENCE_S)
    if said == [True]:
        writer.close()
        return None if failing.count < at else False
    assert said == [False]
    assert (writer.failed, writer.spills, writer.pending, writer.pending_bytes) == (1, 0, 0, 0)
    assert writer.off == "No space left on device"
    assert tier.budget.used() >= on_disk(root)
    assert [name for name in files(root) if name.startswith(".")] == []
    if not fresh:
        assert Restore(tier, [before.piece]).holds(before)
    writer.offer(item)
    assert said == [False, False], "refused for a while"
    now[0] += RETRY_S
    assert writer.off is None
    writer.offer(item)
    assert writer.flush(PATIENCE_S)
    assert tier.off is None
    assert Restore(tier, [item.piece]).holds(item)
    assert tier.budget.used() == on_disk(root), "what was reserved came back"
    writer.close()
    return True


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize(("what", "call"), CALLS, ids=[what for what, _ in CALLS])
def test_a_full_disk_at_any_call_turns_writing_off_and_changes_nothing_else(
    what: str, call: str, fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for at in range(1, 100):
        off = fails_at(call, at, tmp_path / str(at), fresh, monkeypatch)
        if off is None:
            break
        outcomes.append(off)
    assert all(outcomes)
    assert outcomes or not fresh


def test_a_temporary_file_that_can_t_be_deleted_is_no_failure_of_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)

    def refuse(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("mlxpool.worker.cache.ssd_writing._write_all", refuse)
        patched.setattr("mlxpool.shared.kv.budget.os.unlink", refuse)
        writer = Writer(tier, PLENTY, lambda: False, lambda *_: None)
        writer.offer(slices(1)[0])
        writer.flush(PATIENCE_S)
    assert writer.off == "Input/output error"
    assert len(files(tmp_path)) == 1
    assert tier.budget.used() >= on_disk(tmp_path)
    assert kv_folder.clean(tmp_path, PLENTY).unfinished == 1
    assert files(tmp_path) == []
    writer.close()


def test_a_disk_that_fails_gives_up_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(open_tier(tmp_path))
    items = slices(3)
    held.begin(items[0])
    for item in items[1:]:
        held.writer.offer(item)

    def refuse(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mlxpool.worker.cache.ssd_writing.os.pwritev", refuse)
    whole = []
    flush = threading.Thread(target=lambda: whole.append(held.writer.flush(PATIENCE_S)))
    flush.start()
    while not held.writer._flushes:
        assert flush.is_alive()
    held.let_go()
    flush.join(PATIENCE_S)
    assert whole == [False]
    assert sorted(held.said, key=str) == sorted([(item.piece, False) for item in items], key=str)
    assert (held.writer.failed, held.writer.dropped, held.writer.pending_bytes) == (1, 2, 0)
    held.writer.close()


def test_a_folder_that_was_unusable_at_the_start_is_tried_again(tmp_path: Path) -> None:
    in_the_way = tmp_path / MARK.hash
    in_the_way.write_text("in the way")
    tier = open_tier(tmp_path)
    assert tier.off is not None
    now = [0.0]
    writer = Writer(tier, PLENTY, lambda: False, lambda *_: None, lambda: now[0])
    item = slices(1)[0]
    writer.offer(item)
    writer.flush(PATIENCE_S)
    assert (writer.failed, writer.spills) == (1, 0)
    assert tier.off is not None
    in_the_way.unlink()
    now[0] += RETRY_S
    writer.offer(item)
    assert writer.flush(PATIENCE_S)
    assert (tier.off, tier.has(item.piece)) == (None, True)
    writer.close()


def test_a_folder_deleted_under_a_running_worker_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    tier = open_tier(root)
    first, second = slices(2)
    writer = Writer(tier, PLENTY, lambda: False, lambda *_: None)
    writer.offer(first)
    assert writer.flush(PATIENCE_S)
    shutil.rmtree(root)
    writer.offer(second)
    assert writer.flush(PATIENCE_S)
    writer.close()
    assert Restore(tier, [second.piece]).holds(second)
    assert tier.budget.used() == on_disk(root)
    assert [use.model for use in kv_folder.scan(root)] == ["a model"]


@pytest.mark.parametrize("what", ["root", "folder", "file"])
def test_a_folder_deleted_while_a_record_is_written_costs_that_record_alone(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "kv"
    tier = open_tier(root)
    said = []
    writer = Writer(tier, PLENTY, lambda: False, lambda _, durable: said.append(durable))
    real = os.pwritev

    def deleting(*args: Any) -> int:
        for path in {"root": [root], "folder": [root / MARK.hash], "file": root.glob("*/.writing-*")}[what]:
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        return real(*args)

    first, second = slices(1)[0], waiting(*chain(tokens(256, 5000))[0])
    with monkeypatch.context() as patched:
        patched.setattr("mlxpool.worker.cache.ssd_writing.os.pwritev", deleting)
        writer.offer(first)
        assert not writer.flush(PATIENCE_S)
    assert (writer.failed, writer.dropped, writer.off) == (0, 1, None)
    for item in (second, first):
        writer.offer(item)
    assert writer.flush(PATIENCE_S)
    writer.close()
    assert said == [False, True, True]
    restored = Restore(tier, [first.piece, second.piece])
    assert restored.holds(first)
    assert restored.holds(second)
    assert [use.model for use in kv_folder.scan(root)] == ["a model"]
    assert tier.budget.used() >= on_disk(root)


def test_a_fault_of_our_own_turns_writing_off_and_the_thread_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    said = []
    writer = Writer(
        open_tier(tmp_path), PLENTY, lambda: False, lambda _, durable: said.append(durable), lambda: now[0]
    )
    first, second = slices(2)
    with monkeypatch.context() as patched:
        patched.setattr(ssd_writing, "header_bytes", lambda head: 1 / 0)
        writer.offer(first)
        writer.flush(PATIENCE_S)
    now[0] += RETRY_S
    writer.offer(second)
    assert writer.flush(PATIENCE_S)
    assert said == [False, True]
    writer.close()


@pytest.mark.parametrize("step", range(3))
def test_a_writer_killed_in_the_middle_leaves_nothing_wrong(tmp_path: Path, step: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tools.kv_dying", str(tmp_path), str(step)],
        cwd=Path(kv_dying.__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in the middle\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    whole, torn = kv_dying.items()
    tier = open_tier(tmp_path)
    assert Restore(tier, [whole.piece]).holds(whole)
    assert not tier.has(torn.piece)
    assert len(files(tmp_path)) == 2
    assert tier.budget.used() >= on_disk(tmp_path)
    assert kv_folder.clean(tmp_path, PLENTY).unfinished == 1
    assert tier.budget.used() == on_disk(tmp_path)
    write(tier, [torn])
    assert Restore(tier, [whole.piece, torn.piece]).holds(torn)
