"""Writing behind: bounded, unhurried while rows decode, and told to who asked."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.parent.pool.process import STOP_GRACE_S
from mlxpool.shared.kv.names import BLOCK_BYTES
from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.writer import CLOSE_PATIENCE_S, Writer
from tests.unit.kv_world import (
    PATIENCE_S,
    PLENTY,
    Held,
    chain,
    files,
    on_disk,
    open_tier,
    slices,
    tokens,
    waiting,
    write,
)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(open_tier(tmp_path))
    yield made
    made.let_go()
    made.writer.close()


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
