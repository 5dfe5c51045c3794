"""Experts read by several threads at once, bounded in number and in bytes; demand goes before prefetch.

A disk needs several requests under way to give what it can, also where a single expert is missing: threads
share experts' segments, all of one before the next one's, and the thread that ends an expert's last segment
finishes it. More bytes than a bound at once would only be memory bandwidth taken from the products. The
threads are daemons: a read that hangs in the kernel (a disk that went away) can't be ended by anybody, and
must not keep the process alive.

An expert is under way from its first segment to its end. There is at most one more of them than threads: only
the oldest of a queue has segments left that haven't begun, and those of demand keep a thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from mlxpool.worker.colibri.contract import ExpertSource, Filling, ReadDone, Rows
from mlxpool.worker.colibri.segments import SEGMENT_BYTES, Segment

# Of reads under way at the end: a disk's own timeout is 30 s, after which it answers with an error.
CLOSE_LIMIT_S = 40.0


class ReaderStats(NamedTuple):
    """Of experts, since the start. reads, read_bytes: that succeeded. running, waiting: now, waiting without
    those that were cancelled."""

    reads: int
    read_bytes: int
    faults: int
    running: int
    waiting: int


class _Wanted:
    """An expert that is asked for. The reader's lock guards it, and `opening` what `open` sets.

    segments: none until it begins. next: the first that hasn't begun. running: of them, under way. fault:
    the first one.
    """

    def __init__(self, layer: int, expert: int, rows: Rows, size: int) -> None:
        self.layer, self.expert, self.rows, self.size = layer, expert, rows, size
        self.segments: Sequence[Segment] = ()
        self.done: Future[ReadDone] = Future()
        self.next = self.running = 0
        self.began_s = 0.0
        self.fault: Exception | None = None
        self.opening = threading.Lock()
        self.filling: Filling | None = None
        self.refused: Exception | None = None

    def open(self, source: ExpertSource) -> Filling:
        """What its segments go through, made by the thread that comes first. Raises as `begin` does."""
        with self.opening:
            if self.refused is not None:
                raise self.refused
            if self.filling is None:
                try:
                    self.filling = source.begin(self.layer, self.expert, self.rows)
                except Exception as problem:
                    self.refused = problem
                    raise
            return self.filling


class Reader:
    """contract.ExpertReader. Owns the source and its threads; any thread may call it."""

    def __init__(self, source: ExpertSource, threads: int, in_flight_bytes: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads can't read")
        self._source, self._most_bytes = source, in_flight_bytes
        lock = threading.Lock()
        # Of threads that wait for something to read, and for bytes under way to end.
        self._asked, self._room = threading.Condition(lock), threading.Condition(lock)
        self._demand: deque[_Wanted] = deque()
        self._ahead: deque[_Wanted] = deque()
        self._running = self._running_segments = self._running_bytes = 0
        self._reads = self._read_bytes = self._faults = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-reader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, layer: int, expert: int, rows: Rows, *, demand: bool = True) -> Future[ReadDone]:
        layout = self._source.layout(layer)
        if not 0 <= expert < layout.experts:
            raise ValueError(f"layer {layer} has {layout.experts} experts, no {expert}")
        wanted = _Wanted(layer, expert, rows, layout.record_bytes)
        with self._asked:
            if self._closing:
                raise RuntimeError("the reader is closed")
            (self._demand if demand else self._ahead).append(wanted)
            self._asked.notify(len(self._threads))
        return wanted.done

    def hasten(self, read: Future[ReadDone]) -> None:
        with self._asked:
            # What was read ahead behind the oldest either hasn't begun or has no more segments to begin.
            if self._ahead and self._ahead[0].done is read:
                self._demand.append(self._ahead.popleft())

    def stats(self) -> ReaderStats:
        with self._asked:
            queued = [*self._demand, *self._ahead]
            waiting = sum(not one.next and not one.done.cancelled() for one in queued)
            return ReaderStats(self._reads, self._read_bytes, self._faults, self._running, waiting)

    def close(self) -> None:
        with self._asked:
            self._closing = True
            dropped = []
            for queue in (self._demand, self._ahead):
                dropped += [one for one in queue if not one.next]
                begun = [one for one in queue if one.next]
                queue.clear()
                queue.extend(begun)
            self._asked.notify_all()
        for wanted in dropped:
            wanted.done.cancel()
            wanted.done.set_running_or_notify_cancel()
        until = time.monotonic() + CLOSE_LIMIT_S
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
        # Under a read that hangs its file stays open: the number could become another file's.
        if not any(thread.is_alive() for thread in self._threads):
            self._source.close()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            self._read(*taken)
            # While the thread waits, slots that are given back must be free.
            del taken

    def _read(self, wanted: _Wanted, segment: Segment) -> None:
        fault: Exception | None = None
        try:
            wanted.open(self._source).read(segment)
        except Exception as problem:
            fault = problem
        if self._ended(wanted, segment, fault):
            self._finish(wanted)

    def _take(self) -> tuple[_Wanted, Segment] | None:
        """The next segment whose turn it is, once it may begin; None at the end."""
        with self._asked:
            while True:
                queue = self._demand or self._ahead
                if not queue:
                    if self._closing:
                        return None
                    self._asked.wait()
                    continue
                wanted = queue[0]
                if wanted.done.cancelled():
                    queue.popleft().done.set_running_or_notify_cancel()
                    continue
                if not wanted.segments:
                    wanted.segments = self._cut(wanted, len(queue))
                segment = wanted.segments[wanted.next]
                if self._running_segments and self._running_bytes + segment.size > self._most_bytes:
                    self._room.wait()
                    continue
                if not wanted.next:
                    if not wanted.done.set_running_or_notify_cancel():
                        queue.popleft()
                        continue
                    wanted.began_s = time.perf_counter()
                    self._running += 1
                wanted.next += 1
                wanted.running += 1
                if wanted.next == len(wanted.segments):
                    queue.popleft()
                self._running_segments += 1
                self._running_bytes += segment.size
                return wanted, segment

    def _cut(self, wanted: _Wanted, waiting: int) -> Sequence[Segment]:
        """waiting: experts in its queue. What waits is shared among the threads, so that many are read in
        large pieces, which cost fewer turns, and the last in ones that end together; in none so large that
        the bound leaves threads without one."""
        share = min(wanted.size * waiting, self._most_bytes) // len(self._threads)
        return self._source.segments(wanted.layer, wanted.expert, max(share, SEGMENT_BYTES))

    def _ended(self, wanted: _Wanted, segment: Segment, fault: Exception | None) -> bool:
        """Whether it was the last of the expert's segments."""
        with self._asked:
            self._running_segments -= 1
            self._running_bytes -= segment.size
            self._room.notify_all()
            if fault is not None:
                wanted.fault = wanted.fault or fault
                for queue in (self._demand, self._ahead):
                    if wanted in queue:
                        queue.remove(wanted)
                wanted.next = len(wanted.segments)
            wanted.running -= 1
            return not wanted.running and wanted.next == len(wanted.segments)

    def _finish(self, wanted: _Wanted) -> None:
        """Counted before the future is told: who waits for it finds it counted."""
        fault = wanted.fault
        if wanted.filling is not None:
            try:
                if fault is None:
                    wanted.filling.finish()
            except Exception as problem:
                fault = problem
            wanted.filling.release()
        took_s = time.perf_counter() - wanted.began_s
        with self._asked:
            self._running -= 1
            if fault is not None:
                self._faults += 1
            else:
                self._reads += 1
                self._read_bytes += wanted.size
        if fault is not None:
            wanted.done.set_exception(fault)
        else:
            wanted.done.set_result(ReadDone(wanted.size, took_s))
