"""The reader's turns: what goes first, how much at once, what ends how."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import numpy as np
import pytest

from mlxpool.shared.colibri.layout import ExpertLayout, Piece, Strided
from mlxpool.worker.colibri import reader as readers
from mlxpool.worker.colibri.contract import ReadDone, Rows
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.reader import Reader

LIMIT_S = 60.0
SIZE = 100


class HeldSource:
    """Experts that are read when a test lets them; layer 1's are three times as large as layer 0's."""

    artifact: Any = None

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.running = self.most = 0
        self.is_closed = False
        self.broken: set[int] = set()
        self._let: dict[tuple[int, int], threading.Event] = {}
        self._changed = threading.Condition()

    def layout(self, layer: int) -> ExpertLayout:
        size = SIZE * (3 if layer else 1)
        piece = Piece("w", "U8", (size,), size, Strided("f", 0, size))
        return ExpertLayout(layer, "m", 64, (piece,), (), {})

    def fill(self, layer: int, expert: int, rows: Rows) -> int:
        with self._changed:
            self.begun.append((layer, expert))
            self.running += self.layout(layer).record_bytes
            self.most = max(self.most, self.running)
            self._changed.notify_all()
        assert self._gate(layer, expert).wait(LIMIT_S)
        with self._changed:
            self.running -= self.layout(layer).record_bytes
        if expert in self.broken:
            raise ReadFault(layer, expert, "f", "broken")
        for row in rows.values():
            row[:] = expert
        return self.layout(layer).record_bytes

    def close(self) -> None:
        self.is_closed = True

    def _gate(self, layer: int, expert: int) -> threading.Event:
        with self._changed:
            return self._let.setdefault((layer, expert), threading.Event())

    def let(self, *experts: int, layer: int = 0) -> None:
        for expert in experts:
            self._gate(layer, expert).set()

    def until_begun(self, count: int) -> list[tuple[int, int]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, LIMIT_S)
            return list(self.begun)


Begin = Callable[..., tuple[HeldSource, Reader]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    made: list[tuple[HeldSource, Reader]] = []

    def start(threads: int = 1, in_flight_bytes: int = 10**9) -> tuple[HeldSource, Reader]:
        source = HeldSource()
        made.append((source, Reader(source, threads, in_flight_bytes)))
        return made[-1]

    yield start
    for source, reader in made:
        source.let(*range(64))
        source.let(*range(64), layer=1)
        reader.close()


def ask(reader: Reader, expert: int, *, layer: int = 0, demand: bool = True) -> Future[ReadDone]:
    return reader.submit(layer, expert, {}, demand=demand)


def test_demand_goes_before_prefetch_and_each_in_turn(begin: Begin) -> None:
    source, reader = begin()
    first = ask(reader, 0)
    source.until_begun(1)
    others = [ask(reader, expert, demand=expert in (3, 4)) for expert in (1, 2, 3, 4)]
    source.let(0, 1, 2, 3, 4)
    wait([first, *others], LIMIT_S)
    assert source.begun == [(0, 0), (0, 3), (0, 4), (0, 1), (0, 2)]


def test_as_many_read_at_once_as_there_are_threads(begin: Begin) -> None:
    source, reader = begin(threads=3)
    futures = [ask(reader, expert) for expert in range(6)]
    assert len(source.until_begun(3)) == 3
    assert reader.stats().running == 3
    assert reader.stats().waiting == 3
    assert reader.is_busy()
    source.let(*range(6))
    wait(futures, LIMIT_S)
    assert source.most == 3 * SIZE
    assert not reader.is_busy()


def test_bytes_at_once_are_bounded_but_one_is_always_read(begin: Begin) -> None:
    source, reader = begin(threads=4, in_flight_bytes=2 * SIZE)
    futures = [ask(reader, expert) for expert in range(4)]
    # Larger than the bound: read alone.
    futures.append(ask(reader, 9, layer=1))
    futures.append(ask(reader, 10))
    source.until_begun(2)
    assert reader.stats().running == 2
    source.let(*range(11))
    source.let(9, layer=1)
    wait(futures, LIMIT_S)
    assert source.begun[:4] != []
    assert source.most == 3 * SIZE
    assert reader.stats().read_bytes == 8 * SIZE


def test_what_has_not_begun_can_be_taken_back_and_what_has_can_not(begin: Begin) -> None:
    source, reader = begin()
    under_way = ask(reader, 0)
    source.until_begun(1)
    waiting = [ask(reader, expert, demand=bool(expert % 2)) for expert in (1, 2, 3)]
    assert all(one.cancel() for one in waiting[:2])
    assert not under_way.cancel()
    assert reader.stats().waiting == 1
    source.let(0, 3)
    wait([under_way, *waiting], LIMIT_S)
    assert source.begun == [(0, 0), (0, 3)]
    assert reader.stats().reads == 2


def test_a_failed_read_is_that_ones_fault_alone(begin: Begin) -> None:
    source, reader = begin()
    source.broken.add(1)
    source.let(0, 1, 2)
    futures = [ask(reader, expert) for expert in range(3)]
    with pytest.raises(ReadFault, match="layer 0, expert 1 could not be read from f: broken"):
        futures[1].result(LIMIT_S)
    assert [futures[one].result(LIMIT_S).read_bytes for one in (0, 2)] == [SIZE, SIZE]
    stats = reader.stats()
    assert (stats.reads, stats.faults, stats.read_bytes) == (2, 1, 2 * SIZE)
    assert len(stats.service_s) == 2


def test_rows_are_filled_when_the_future_says_so(begin: Begin) -> None:
    source, reader = begin(threads=4)
    source.let(*range(20))
    rows = [{("up_proj", "weight"): np.zeros(8, np.uint8)} for _ in range(20)]
    futures = [reader.submit(0, expert, rows[expert]) for expert in range(20)]
    for expert, future in enumerate(futures):
        future.result(LIMIT_S)
        assert (rows[expert]["up_proj", "weight"] == expert).all()


def test_the_end_waits_for_reads_under_way_and_drops_the_others(begin: Begin) -> None:
    source, reader = begin()
    under_way = ask(reader, 0)
    source.until_begun(1)
    dropped = [ask(reader, 1), ask(reader, 2, demand=False)]
    closing = threading.Thread(target=reader.close)
    closing.start()
    for one in dropped:
        with pytest.raises(CancelledError):
            one.result(LIMIT_S)
    assert not source.is_closed
    source.let(0)
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert under_way.result(0).read_bytes == SIZE
    assert source.is_closed
    with pytest.raises(RuntimeError, match="closed"):
        ask(reader, 3)


def test_a_read_that_hangs_does_not_hold_up_the_end(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CLOSE_LIMIT_S", 0.05)
    source, reader = begin()
    ask(reader, 0)
    source.until_begun(1)
    reader.close()
    # Its file may not be closed under it: the number could be given to another.
    assert not source.is_closed
