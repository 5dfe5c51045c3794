"""The reader's turns: what goes first, how much at once, what ends how."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import numpy as np
import pytest

from mlxpool.shared.colibri.layout import ExpertLayout, Piece, Strided
from mlxpool.worker.colibri import reader as readers
from mlxpool.worker.colibri.contract import ExpertSource, Filling, ReadDone, Rows
from mlxpool.worker.colibri.faults import ReadFault
from mlxpool.worker.colibri.reader import Reader
from mlxpool.worker.colibri.segments import Segment

LIMIT_S = 60.0
SIZE = 100
PARTS = 4


class HeldSource(ExpertSource):
    """Experts whose segments are read when a test lets them; layer 1's are three times as large as layer 0's,
    and those of layer 2 are of `PARTS` segments."""

    artifact: Any = None

    def __init__(self) -> None:
        self.begun: list[tuple[int, ...]] = []
        self.running = self.most = 0
        self.is_closed = False
        self.broken: set[tuple[int, ...]] = set()
        self.refused: set[int] = set()
        self.opened: list[int] = []
        self.finished: list[int] = []
        self.released: list[int] = []
        self._let: dict[tuple[int, ...], threading.Event] = {}
        self._changed = threading.Condition()

    def layout(self, layer: int) -> ExpertLayout:
        size = SIZE * (1, 3, PARTS)[layer]
        piece = Piece("w", "U8", (size,), size, Strided("f", 0, size))
        return ExpertLayout(layer, "m", 64, (piece,), (), {})

    def segments(self, layer: int, _expert: int, _most_bytes: int) -> list[Segment]:
        if layer == 2:
            return [Segment("f", part, SIZE, ()) for part in range(PARTS)]
        return [Segment("f", 0, self.layout(layer).record_bytes, ())]

    def begin(self, layer: int, expert: int, rows: Rows) -> Filling:
        self.opened.append(expert)
        if expert in self.refused:
            raise ReadFault(layer, expert, "host memory", "refused")
        return _Held(self, layer, expert, rows)

    def read(self, layer: int, expert: int, segment: Segment) -> None:
        one = (layer, expert, segment.offset) if layer == 2 else (layer, expert)
        with self._changed:
            self.begun.append(one)
            self.running += segment.size
            self.most = max(self.most, self.running)
            self._changed.notify_all()
        assert self.gate(*one).wait(LIMIT_S)
        with self._changed:
            self.running -= segment.size
        if one in self.broken:
            raise ReadFault(layer, expert, "f", f"broken at {segment.offset}")

    def overwritten(self) -> str | None:
        return None

    def close(self) -> None:
        self.is_closed = True

    def gate(self, *one: int) -> threading.Event:
        with self._changed:
            return self._let.setdefault(one, threading.Event())

    def let(self, *experts: int, layer: int = 0) -> None:
        for expert in experts:
            self.gate(layer, expert).set()

    def let_parts(self, expert: int, *parts: int) -> None:
        for part in parts:
            self.gate(2, expert, part).set()

    def until_begun(self, count: int) -> list[tuple[int, ...]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, LIMIT_S)
            return list(self.begun)


class _Held:
    def __init__(self, source: HeldSource, layer: int, expert: int, rows: Rows) -> None:
        self._source, self._layer, self._expert, self._rows = source, layer, expert, rows

    def read(self, segment: Segment) -> None:
        self._source.read(self._layer, self._expert, segment)

    def finish(self) -> None:
        self._source.finished.append(self._expert)
        for row in self._rows.values():
            row[:] = self._expert

    def release(self) -> None:
        self._source.released.append(self._expert)


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
        for expert in range(64):
            source.let_parts(expert, *range(PARTS))
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
    source.let(*range(6))
    wait(futures, LIMIT_S)
    assert source.most == 3 * SIZE


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
    source.broken.add((0, 1))
    source.let(0, 1, 2)
    futures = [ask(reader, expert) for expert in range(3)]
    with pytest.raises(ReadFault, match="layer 0, expert 1 could not be read from f: broken at 0"):
        futures[1].result(LIMIT_S)
    assert [futures[one].result(LIMIT_S).read_bytes for one in (0, 2)] == [SIZE, SIZE]
    stats = reader.stats()
    assert (stats.reads, stats.faults, stats.read_bytes) == (2, 1, 2 * SIZE)


def test_rows_are_filled_when_the_future_says_so(begin: Begin) -> None:
    source, reader = begin(threads=4)
    source.let(*range(20))
    rows = [{("up_proj", "weight"): np.zeros(8, np.uint8)} for _ in range(20)]
    futures = [reader.submit(0, expert, rows[expert]) for expert in range(20)]
    for expert, future in enumerate(futures):
        future.result(LIMIT_S)
        assert (rows[expert]["up_proj", "weight"] == expert).all()


def test_threads_that_wait_keep_nothing_of_a_slot(begin: Begin) -> None:
    """Slots are given back where memory is short, when nothing is read."""
    source, reader = begin(threads=2)
    source.let(0)
    row = np.zeros(8, np.uint8)
    gone = threading.Event()
    watched = weakref.ref(row, lambda _: gone.set())
    reader.submit(0, 0, {("up_proj", "weight"): row}).result(LIMIT_S)
    del row
    assert gone.wait(LIMIT_S)
    assert watched() is None


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


def parts(*experts: int) -> list[tuple[int, ...]]:
    return [(2, expert, part) for expert in experts for part in range(PARTS)]


def test_all_threads_read_the_only_expert_that_is_asked_for(begin: Begin) -> None:
    source, reader = begin(threads=3)
    read = ask(reader, 5, layer=2)
    assert sorted(source.until_begun(3)) == parts(5)[:3]
    assert (reader.stats().running, reader.stats().waiting) == (1, 0)
    source.let_parts(5, 0, 1, 3)
    assert not read.done()
    source.let_parts(5, 2)
    assert read.result(LIMIT_S).read_bytes == PARTS * SIZE
    assert sorted(source.begun) == parts(5)
    assert (source.opened, source.finished, source.released) == ([5], [5], [5])


def test_what_waits_is_shared_among_the_threads(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread alone takes experts whole, and many threads an expert that is alone in as many pieces."""
    monkeypatch.setattr(readers, "SEGMENT_BYTES", 30)

    def asked(threads: int, experts: int, in_flight_bytes: int = 10**9) -> list[int]:
        source, reader = begin(threads, in_flight_bytes)
        cut = source.segments
        asked: list[int] = []
        source.segments = lambda *of: asked.append(of[2]) or cut(*of)  # type: ignore[method-assign]
        held = [ask(reader, 60 + one, layer=1) for one in range(threads)]
        source.until_begun(threads)
        asked.clear()
        futures = [ask(reader, expert) for expert in range(experts)]
        source.let(*range(60, 64), layer=1)
        source.let(*range(experts))
        wait([*held, *futures], LIMIT_S)
        return asked

    assert asked(1, 3) == [3 * SIZE, 2 * SIZE, SIZE]
    assert asked(2, 3) == [3 * SIZE // 2, SIZE, SIZE // 2]
    assert asked(4, 2) == [SIZE // 2, 30]
    # Larger ones would leave a thread without any.
    assert asked(2, 8, 6 * SIZE) == [300, 300, 300, 250, 200, 150, 100, 50]


def test_an_expert_that_a_layer_does_not_have_is_refused(begin: Begin) -> None:
    _, reader = begin()
    with pytest.raises(ValueError, match="layer 0 has 64 experts, no 64"):
        ask(reader, 64)


def test_all_segments_of_an_expert_go_before_the_next_ones(begin: Begin) -> None:
    source, reader = begin()
    futures = [ask(reader, expert, layer=2) for expert in (3, 1, 2)]
    for expert in (1, 2, 3):
        source.let_parts(expert, *range(PARTS))
    wait(futures, LIMIT_S)
    assert source.begun == parts(3, 1, 2)


def test_demand_goes_before_the_rest_of_what_is_read_ahead(begin: Begin) -> None:
    source, reader = begin()
    ahead = ask(reader, 1, layer=2, demand=False)
    source.until_begun(1)
    demand = ask(reader, 2, layer=2)
    source.let_parts(1, *range(PARTS))
    source.let_parts(2, *range(PARTS))
    wait([ahead, demand], LIMIT_S)
    assert source.begun == [*parts(1)[:1], *parts(2), *parts(1)[1:]]
    assert source.finished == [2, 1]


def test_what_was_read_ahead_goes_before_later_demand_once_it_is_demanded_itself(begin: Begin) -> None:
    source, reader = begin()
    ahead, unneeded = (ask(reader, expert, layer=2, demand=False) for expert in (1, 3))
    source.until_begun(1)
    reader.hasten(ahead)
    demand = ask(reader, 2, layer=2)
    for expert in (1, 2, 3):
        source.let_parts(expert, *range(PARTS))
    wait([ahead, demand, unneeded], LIMIT_S)
    assert source.begun == parts(1, 2, 3)
    reader.hasten(ahead)
    assert reader.stats()[:4] == (3, 3 * PARTS * SIZE, 0, 0)


def test_what_fails_behind_other_demand_is_read_no_further(begin: Begin) -> None:
    source, reader = begin(threads=2)
    source.broken.add((2, 1, 1))
    held = ask(reader, 60)
    source.until_begun(1)
    ahead = ask(reader, 1, layer=2, demand=False)
    source.let_parts(1, 0)
    source.until_begun(3)
    first, second = ask(reader, 2, layer=2), ask(reader, 3)
    reader.hasten(ahead)
    source.let_parts(1, 1)
    with pytest.raises(ReadFault, match="layer 2, expert 1 could not be read from f: broken at 1"):
        ahead.result(LIMIT_S)
    source.let_parts(2, *range(PARTS))
    source.let(3, 60)
    wait([held, first, second], LIMIT_S)
    assert [one for one in source.begun if one[:2] == (2, 1)] == parts(1)[:2]
    assert (reader.stats().reads, reader.stats().faults, reader.stats().running) == (3, 1, 0)


def test_bytes_under_way_are_those_of_segments(begin: Begin) -> None:
    source, reader = begin(threads=4, in_flight_bytes=2 * SIZE)
    futures = [ask(reader, expert, layer=2) for expert in range(3)]
    source.until_begun(2)
    for expert in range(3):
        source.let_parts(expert, *range(PARTS))
    wait(futures, LIMIT_S)
    assert source.most == 2 * SIZE


def test_an_expert_can_be_taken_back_until_its_first_segment_has_begun(begin: Begin) -> None:
    source, reader = begin()
    under_way, waiting = ask(reader, 1, layer=2), ask(reader, 2, layer=2)
    source.until_begun(1)
    assert not under_way.cancel()
    assert waiting.cancel()
    source.let_parts(1, *range(PARTS))
    assert under_way.result(LIMIT_S).read_bytes == PARTS * SIZE
    assert source.begun == parts(1)


def test_after_a_fault_no_more_of_the_expert_is_read_and_what_is_under_way_is_waited_for(
    begin: Begin,
) -> None:
    source, reader = begin(threads=2)
    source.broken |= {(2, 7, 0), (2, 7, 1)}
    broken, whole = ask(reader, 7, layer=2), ask(reader, 8)
    source.until_begun(2)
    source.let_parts(7, 1)
    # The thread that met the fault goes on with the next expert.
    assert source.until_begun(3)[-1] == (0, 8)
    assert not broken.done()
    assert source.released == []
    source.let_parts(7, 0)
    with pytest.raises(ReadFault, match="layer 2, expert 7 could not be read from f: broken at 1"):
        broken.result(LIMIT_S)
    assert (source.finished, source.released) == ([], [7])
    source.let(8)
    whole.result(LIMIT_S)
    assert sorted(source.begun) == [(0, 8), (2, 7, 0), (2, 7, 1)]
    assert (reader.stats().reads, reader.stats().faults, reader.stats().running) == (1, 1, 0)


def test_an_expert_without_a_buffer_is_asked_for_one_once(begin: Begin) -> None:
    source, reader = begin(threads=3)
    source.refused.add(4)
    for _ in range(2):
        with pytest.raises(ReadFault, match="expert 4 could not be read from host memory: refused"):
            ask(reader, 4, layer=2).result(LIMIT_S)
    assert source.opened == [4, 4]
    assert source.begun == source.released == []


def test_what_can_not_be_finished_is_a_fault(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    source, reader = begin()
    monkeypatch.setattr(_Held, "finish", lambda self: self.read(Segment("f", 9, 0, ())))
    source.broken.add((2, 6, 9))
    source.let_parts(6, *range(PARTS), 9)
    with pytest.raises(ReadFault, match="broken at 9"):
        ask(reader, 6, layer=2).result(LIMIT_S)
    assert source.released == [6]


def test_at_the_end_an_expert_that_has_begun_is_read_whole(begin: Begin) -> None:
    source, reader = begin()
    under_way, dropped = ask(reader, 1, layer=2), ask(reader, 2, layer=2)
    source.until_begun(1)
    closing = threading.Thread(target=reader.close)
    closing.start()
    with pytest.raises(CancelledError):
        dropped.result(LIMIT_S)
    source.let_parts(1, *range(PARTS))
    closing.join(LIMIT_S)
    assert under_way.result(0).read_bytes == PARTS * SIZE
    assert source.is_closed


def test_no_more_experts_are_under_way_than_there_are_threads_and_one(begin: Begin) -> None:
    """What buffers are counted by."""
    source, reader = begin(threads=3, in_flight_bytes=2 * SIZE)
    for expert in range(64):
        source.let_parts(expert, *range(PARTS))
    counted = threading.Lock()
    under_way: set[int] = set()
    most = 0
    opens, releases = source.begin, _Held.release

    def opened(layer: int, expert: int, rows: Rows) -> Filling:
        nonlocal most
        with counted:
            under_way.add(expert)
            most = max(most, len(under_way))
        return opens(layer, expert, rows)

    def released(held: _Held) -> None:
        releases(held)
        with counted:
            under_way.discard(source.released[-1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(source, "begin", opened)
        patched.setattr(_Held, "release", released)
        draw = np.random.default_rng(1)
        futures = [
            ask(reader, expert, layer=2, demand=bool(draw.integers(2)))
            for _ in range(10)
            for expert in draw.permutation(64).tolist()
        ]
        wait(futures, LIMIT_S)
    assert 1 <= most <= 4
    assert reader.stats().reads == 640
