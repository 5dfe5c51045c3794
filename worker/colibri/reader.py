"""Experts read by several threads at once, bounded in number and in bytes; demand goes before prefetch.

A disk needs several requests under way to give what it can; more bytes than a bound at once would only be
memory bandwidth taken from the products. The threads are daemons: a read that hangs in the kernel (a disk
that went away) can't be ended by anybody, and must not keep the process alive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

from mlxpool.worker.colibri.contract import ExpertSource, ReadDone, Rows

# Of reads under way at the end: a disk's own timeout is 30 s, after which it answers with an error.
CLOSE_LIMIT_S = 40.0
# Of service times that are kept, the latest: enough for a 99th percentile, and of this machine's present.
SERVICE_TIMES = 4096


class ReaderStats(NamedTuple):
    """Since the start. reads, read_bytes: that succeeded. service_s: of the latest, oldest first. running,
    waiting: now, waiting without those that were cancelled."""

    reads: int
    read_bytes: int
    faults: int
    service_s: tuple[float, ...]
    running: int
    waiting: int


class _Wanted(NamedTuple):
    layer: int
    expert: int
    rows: Rows
    size: int
    done: Future[ReadDone]


class Reader:
    """contract.ExpertReader. Owns the source and its threads; any thread may call it."""

    def __init__(self, source: ExpertSource, threads: int, in_flight_bytes: int) -> None:
        if threads < 1:
            raise ValueError(f"{threads} threads can't read")
        self._source, self._most_bytes = source, in_flight_bytes
        self._changed = threading.Condition()
        self._demand: deque[_Wanted] = deque()
        self._ahead: deque[_Wanted] = deque()
        self._running = self._running_bytes = 0
        self._reads = self._read_bytes = self._faults = 0
        self._service: deque[float] = deque(maxlen=SERVICE_TIMES)
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-reader-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, layer: int, expert: int, rows: Rows, *, demand: bool = True) -> Future[ReadDone]:
        size = self._source.layout(layer).record_bytes
        wanted = _Wanted(layer, expert, rows, size, Future())
        with self._changed:
            if self._closing:
                raise RuntimeError("the reader is closed")
            (self._demand if demand else self._ahead).append(wanted)
            self._changed.notify()
        return wanted.done

    def stats(self) -> ReaderStats:
        with self._changed:
            return ReaderStats(
                self._reads,
                self._read_bytes,
                self._faults,
                tuple(self._service),
                self._running,
                sum(not one.done.cancelled() for queue in (self._demand, self._ahead) for one in queue),
            )

    def is_busy(self) -> bool:
        """Whether a read that is asked for now would have to wait for its turn."""
        with self._changed:
            return self._running + len(self._demand) + len(self._ahead) >= len(self._threads)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            dropped = [*self._demand, *self._ahead]
            self._demand.clear()
            self._ahead.clear()
            self._changed.notify_all()
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
        while (wanted := self._next()) is not None:
            began = time.perf_counter()
            try:
                read_bytes = self._source.fill(wanted.layer, wanted.expert, wanted.rows)
            except Exception as problem:
                self._over(wanted, None)
                wanted.done.set_exception(problem)
            else:
                done = ReadDone(read_bytes, time.perf_counter() - began)
                self._over(wanted, done)
                wanted.done.set_result(done)

    def _next(self) -> _Wanted | None:
        """The next read whose turn it is, once it may begin; None at the end."""
        with self._changed:
            while not self._closing:
                queue = self._demand or self._ahead
                if not queue:
                    self._changed.wait()
                elif queue[0].done.cancelled():
                    queue.popleft().done.set_running_or_notify_cancel()
                elif self._running and self._running_bytes + queue[0].size > self._most_bytes:
                    self._changed.wait()
                else:
                    wanted = queue.popleft()
                    if wanted.done.set_running_or_notify_cancel():
                        self._running += 1
                        self._running_bytes += wanted.size
                        return wanted
            return None

    def _over(self, wanted: _Wanted, done: ReadDone | None) -> None:
        """Counted before the future is told: who waits for it finds it counted."""
        with self._changed:
            self._running -= 1
            self._running_bytes -= wanted.size
            if done is None:
                self._faults += 1
            else:
                self._reads += 1
                self._read_bytes += done.read_bytes
                self._service.append(done.service_s)
            self._changed.notify_all()
