"""Writing behind: bounded, unhurried while rows decode, and no fault of a disk is anybody's but its own."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.parent.pool.process import STOP_GRACE_S
from mlxpool.shared.kv import folder as kv_folder
from mlxpool.shared.kv.names import BLOCK_BYTES
from mlxpool.worker.cache import ssd_writing
from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.writer import CLOSE_PATIENCE_S, RETRY_S, Waiting, Writer
from tests.tools import kv_dying
from tests.unit.kv_world import (
    MARK,
    PATIENCE_S,
    PLENTY,
    Restore,
    chain,
    files,
    on_disk,
    open_tier,
    tokens,
    waiting,
    write,
)


class Held:
    """A writer that stands still before its first step until it is let go, and what it said."""

    def __init__(
        self, tier: SsdTier, queue_bytes: int = PLENTY, busy: Callable[[], bool] = lambda: False
    ) -> None:
        self.said: list[tuple[Piece, bool]] = []
        self.now = 0.0
        self.entered = threading.Event()
        self._gate = threading.Event()
        self.writer = Writer(tier, queue_bytes, self._busy(busy), self.wrote, clock=lambda: self.now)

    def _busy(self, busy: Callable[[], bool]) -> Callable[[], bool]:
        def ask() -> bool:
            self.entered.set()
            assert self._gate.wait(PATIENCE_S)
            return busy()

        return ask

    def wrote(self, piece: Piece, durable: bool) -> None:
        self.said.append((piece, durable))

    def begin(self, item: Waiting) -> None:
        """Offers a piece and waits until it is being written."""
        self.writer.offer(item)
        assert self.entered.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._gate.set()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(open_tier(tmp_path))
    yield made
    made.let_go()
    made.writer.close()


def slices(count: int) -> list[Waiting]:
    return [waiting(record, own) for record, own in chain(tokens(256 * count))]


def test_what_is_flushed_is_on_disk_and_everybody_was_told(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    said: list[tuple[Piece, bool]] = []
    writer = Writer(tier, PLENTY, lambda: False, lambda piece, durable: said.append((piece, durable)))
    items = slices(3)
    for item in items:
        writer.offer(item)
    assert writer.flush(PATIENCE_S)
    assert said == [(item.piece, True) for item in items]
    assert (writer.spills, writer.dropped, writer.failed, writer.pending, writer.pending_bytes) == (
        3,
        0,
        0,
        0,
        0,
    )
    assert (tier.entries, tier.longest_prefix_tokens) == (3, 768)
    assert tier.bytes == sum(tier.path(item.piece).stat().st_blocks * 512 for item in items)
    writer.close()


def test_a_flush_of_nothing_is_done_and_starts_no_thread(tmp_path: Path) -> None:
    writer = Writer(open_tier(tmp_path), PLENTY, lambda: False, lambda piece, durable: None)
    before = threading.active_count()
    assert writer.flush(0.0)
    writer.close()
    assert threading.active_count() == before


def test_a_flush_has_a_time_out(held: Held) -> None:
    held.begin(slices(1)[0])
    assert not held.writer.flush(0.01)


def test_what_is_offered_first_is_written_before_what_waits(held: Held) -> None:
    items = slices(4)
    held.begin(items[0])
    held.writer.offer(items[1])
    held.writer.offer(items[2])
    held.writer.offer(items[3], first=True)
    held.let_go()
    assert held.writer.flush(PATIENCE_S)
    assert [piece for piece, _ in held.said] == [items[place].piece for place in (0, 3, 1, 2)]


def test_a_full_queue_gives_up_what_has_waited_longest(tmp_path: Path) -> None:
    items = slices(4)
    held = Held(open_tier(tmp_path), queue_bytes=3 * items[0].nbytes)
    held.begin(items[0])
    for item in items[1:]:
        held.writer.offer(item)
    assert held.said == [(items[1].piece, False)]
    assert (held.writer.dropped, held.writer.pending) == (1, 3)
    assert held.writer.pending_bytes == 3 * items[0].nbytes
    held.let_go()
    assert held.writer.flush(PATIENCE_S)
    assert [held.writer._tier.has(item.piece) for item in items] == [True, False, True, True]
    held.writer.close()


@pytest.mark.parametrize("queue_bytes", [0, 100])
def test_a_queue_shorter_than_a_record_takes_one_at_a_time(tmp_path: Path, queue_bytes: int) -> None:
    held = Held(open_tier(tmp_path), queue_bytes)
    items = slices(4)
    assert held.writer.takes(PLENTY)
    held.begin(items[0])
    assert not held.writer.takes(PLENTY)
    held.writer.offer(items[1])
    held.writer.offer(items[2])
    assert held.said == [(items[1].piece, False)]
    held.let_go()
    assert held.writer.flush(PATIENCE_S)
    assert held.writer.takes(PLENTY)
    held.writer.offer(items[3])
    assert held.writer.flush(PATIENCE_S)
    assert [held.writer._tier.has(item.piece) for item in items] == [True, False, True, True]
    held.writer.close()


def test_nothing_is_given_up_for_what_is_offered_while_the_writer_takes_more(tmp_path: Path) -> None:
    items = slices(6)
    size = items[0].nbytes
    held = Held(open_tier(tmp_path), queue_bytes=2 * size + 1)
    held.begin(items[0])
    taken = 1
    while held.writer.takes(PLENTY):
        held.writer.offer(items[taken])
        taken += 1
    assert (taken, held.said) == (3, [])
    held.let_go()
    assert held.writer.flush(PATIENCE_S)
    held.writer.close()


def test_whoever_offers_may_want_less_to_wait_than_the_queue_holds(held: Held) -> None:
    (item,) = slices(1)
    assert held.writer.takes(0)
    held.begin(item)
    assert [held.writer.takes(limit) for limit in (item.nbytes, item.nbytes + 1)] == [False, True]


def test_a_piece_is_written_once(held: Held) -> None:
    first, second = slices(2)
    held.begin(first)
    held.writer.offer(first)
    held.writer.offer(second)
    held.writer.offer(second)
    assert held.writer.pending == 2
    held.let_go()
    assert held.writer.flush(PATIENCE_S)
    held.writer.offer(first)
    assert held.said == [(first.piece, True), (second.piece, True), (first.piece, True)]
    assert held.writer.spills == 2


def test_closing_gives_up_what_waits_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    held = Held(open_tier(tmp_path))
    items = slices(2)
    held.begin(items[0])
    held.writer.offer(items[1])
    closing = threading.Thread(target=held.writer.close)
    closing.start()
    while not held.said:
        assert closing.is_alive() or held.said
    held.let_go()
    closing.join(PATIENCE_S)
    assert held.said == [(items[1].piece, False), (items[0].piece, False)]
    assert files(tmp_path) == []
    held.writer.offer(items[0])
    assert held.said[-1] == (items[0].piece, False)
    assert held.writer.flush(0.0)


def test_the_end_of_a_worker_waits_for_a_disk_for_less_time_than_the_parent_for_the_worker() -> None:
    assert CLOSE_PATIENCE_S <= STOP_GRACE_S / 2


def test_while_rows_decode_it_works_one_part_in_a_hundred_in_small_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, worked, rested, steps = [0.0], [0.0], [0.0], []
    real = os.pwritev

    def slow(descriptor: int, data: Any, place: int) -> int:
        now[0] += 0.002
        worked[0] += 0.002
        steps.append(sum(map(len, data)))
        return real(descriptor, data, place)

    def rest(condition: threading.Condition, seconds: float) -> None:
        now[0] += seconds
        rested[0] += seconds

    monkeypatch.setattr("mlxpool.worker.cache.ssd_writing.os.pwritev", slow)
    item = waiting(*chain(tokens(256))[0], floats=5_000_000)
    writer = Writer(open_tier(tmp_path), PLENTY, lambda: True, lambda *_: None, lambda: now[0], rest)
    writer.offer(item)
    # The thread's own end: a flush would hurry it.
    while writer.pending:
        assert writer._thread is not None
        writer._thread.join(0.01)
    assert writer.spills == 1
    assert max(steps) <= 2**20
    assert 0.009 < worked[0] / now[0] < 0.0111
    writer.close()


@pytest.mark.parametrize("way", ["flush", "idle", "close"])
def test_a_rest_ends_at_once_when_there_is_no_reason_for_it(tmp_path: Path, way: str) -> None:
    resting, decoding = threading.Event(), [True]
    clock = iter(range(10**9))

    def rest(condition: threading.Condition, seconds: float) -> None:
        # A clock that goes a second forward at every look makes every rest a long one.
        resting.set()
        condition.wait(0.01 if way == "idle" else PATIENCE_S)

    said = []
    tier = open_tier(tmp_path)
    writer = Writer(
        tier,
        PLENTY,
        lambda: decoding[0],
        lambda piece, durable: said.append(durable),
        lambda: next(clock),
        rest,
    )
    writer.offer(slices(1)[0])
    assert resting.wait(PATIENCE_S)
    if way == "flush":
        assert writer.flush(PATIENCE_S)
    elif way == "idle":
        decoding[0] = False
        assert writer.flush(PATIENCE_S)
    else:
        writer.close()
    assert said == [way != "close"]
    writer.close()


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


def resolve(path: str) -> Any:
    names = path.split(".")
    for cut in range(len(names), 0, -1):
        if ".".join(names[:cut]) in sys.modules:
            found: Any = sys.modules[".".join(names[:cut])]
            for part in names[cut:]:
                found = getattr(found, part)
            return found
    raise AssertionError(path)


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
        failing = Failing(resolve(call), at)
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


def test_a_disk_that_fails_gives_up_what_waits(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_conversation_longer_than_the_budget_keeps_its_beginning(tmp_path: Path) -> None:
    items = slices(12)
    max_bytes = (2 + 5 * 2) * BLOCK_BYTES
    tier = open_tier(tmp_path, max_bytes=max_bytes)
    writer = Writer(tier, PLENTY, lambda: False, lambda *_: None)
    for item in items:
        writer.offer(item)
    writer.flush(PATIENCE_S)
    assert tier.entries == 5
    assert tier.longest_prefix_tokens == 5 * 256
    assert (writer.spills, writer.dropped, writer.failed) == (5, 7, 0)
    assert writer.off is None, "a budget that is full is no fault"
    assert on_disk(tmp_path) == max_bytes
    writer.close()


def test_old_prefixes_make_room_for_a_new_one_and_are_forgotten(tmp_path: Path) -> None:
    max_bytes = (2 + 6 * 2) * BLOCK_BYTES
    tier = open_tier(tmp_path, max_bytes=max_bytes)
    old, new = (
        [waiting(record, own, floats=1000) for record, own in chain(tokens(256 * 4, first))]
        for first in (0, 7000)
    )
    write(tier, old)
    for item in old:
        os.utime(tier.path(item.piece), (1000, 1000))
    write(tier, new)
    assert [tier.has(item.piece) for item in new] == [True] * 4
    assert [tier.has(item.piece) for item in old] == [True, True, False, False]
    assert tier.entries == len(files(tmp_path)) == 6
    assert on_disk(tmp_path) == max_bytes


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
