"""Records on their way to the disk: one thread, a bounded queue, and no haste while somebody decodes.

A record is written to a file of its own under a temporary name and gets its name when it is whole
(ssd_writing.py). Nothing is synced: what has its name survives the end of the process in any way,
also a kill; a power cut may lose the newest files or leave them torn, which their hashes tell, so it costs
reuse and never gives wrong text. Waiting for the disk's own cache would cost far more than that.

While rows decode (`busy`), a step of about a megabyte is followed by a rest 99 times as long, so that the
disk, the memory's bandwidth and the interpreter's lock are the decoder's. A flush ends a rest at once; the
end of decoding does so within a moment.

Any fault of the disk turns writing off for RETRY_S: what waits is given up, for memory must not wait for a
disk that may stay full, and what is offered meanwhile is refused. The next offer after that tries again.
Nothing is raised, whatever happens.

The queue and the counters belong to the lock inside the condition. `wrote` is called without it, by the
writer's thread or by who offers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from mlxpool.worker.cache.records import Piece
from mlxpool.worker.cache.ssd import SsdTier
from mlxpool.worker.cache.ssd_writing import Waiting, write_piece

__all__ = ["RETRY_S", "Waiting", "Writer"]

logger = logging.getLogger("mlxpool.cache")

# A step that lasts well under a decode step: a millisecond or less on an SSD.
BUSY_STEP_BYTES = 1024 * 1024
# At full speed: large enough that Python's share vanishes, small enough that what was hashed is still in the
# processor's cache when it is written.
STEP_BYTES = 2 * 1024 * 1024
# One part in a hundred: decoding must not slow down by more than two.
REST_PER_STEP = 99
# How often a rest asks whether rows still decode.
_REST_POLL_S = 0.25
# A disk that was full is asked again this much later.
RETRY_S = 60.0
# Records remembered that had no room; forgetting them costs a few useless writes.
_MAX_ROOMLESS = 4096
# How long the end of a worker waits for the step that is being written, which takes milliseconds: well under
# the 3 s after which the parent ends a worker that stays.
CLOSE_PATIENCE_S = 1.0


class _Item(msgspec.Struct, eq=False):
    """settled: whether `wrote` was called for it, with what."""

    waiting: Waiting
    size_bytes: int
    settled: bool | None = None


class _Interrupted(Exception):
    """The writer is closed."""


class Writer:
    """spills: pieces written. dropped: pieces given up without a try. failed: writes that failed."""

    def __init__(
        self,
        tier: SsdTier,
        queue_bytes: int,
        busy: Callable[[], bool],
        wrote: Callable[[Piece, bool], None],
        clock: Callable[[], float] = time.monotonic,
        rest: Callable[[threading.Condition, float], object] = threading.Condition.wait,
    ) -> None:
        self.spills = 0
        self.dropped = 0
        self.failed = 0
        self._tier = tier
        self._queue_bytes = queue_bytes
        self._busy = busy
        self._wrote = wrote
        self._clock = clock
        self._rest = rest
        self._changed = threading.Condition()
        self._first: deque[_Item] = deque()
        self._queue: deque[_Item] = deque()
        self._waiting_bytes = 0
        self._by_piece: dict[Piece, _Item] = {}
        self._telling: list[_Item] = []
        self._flushes = 0
        self._closed = False
        self._retry_at = float("-inf")
        self._roomless: set[bytes] = set()
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Pieces that wait or are being written."""
        return len(self._by_piece)

    @property
    def pending_bytes(self) -> int:
        return self._waiting_bytes

    @property
    def off(self) -> str | None:
        """Why what is offered now is refused, None where it is taken: also when a new try is due."""
        return self._tier.off if self._refuses() else None

    def _refuses(self) -> bool:
        return self._tier.off is not None and self._clock() < self._retry_at

    def takes(self, limit_bytes: int) -> bool:
        """Whether a piece can be offered now without another one being given up for it, or more waiting than
        `limit_bytes` and that piece."""
        return not self._by_piece or self._waiting_bytes < min(limit_bytes, self._queue_bytes)

    def offer(self, waiting: Waiting, first: bool = False) -> None:
        """Takes a piece to be written, before all others if `first`.

        Where the queue is full with what waits already, what has waited longest is given up for it; so one
        record is always taken, however short the queue is. A piece that waits already, or is on disk, is not
        written twice.
        """
        item = _Item(waiting, waiting.nbytes)
        with self._changed:
            if waiting.piece in self._by_piece:
                return
            if self._tier.has(waiting.piece):
                given_up, written = [item], True
            elif self._closed or self._refuses():
                given_up, written = [item], False
                self.dropped += 1
            else:
                written = False
                self._by_piece[waiting.piece] = item
                self._waiting_bytes += item.size_bytes
                (self._first if first else self._queue).append(item)
                given_up = list(self._overflow(item.size_bytes))
                self._start()
                self._changed.notify_all()
        for dropped in given_up:
            self._settle(dropped, written)

    def _overflow(self, newest_bytes: int) -> Iterator[_Item]:
        """What has to go because the queue was full before the newest came, oldest first. Lock held."""
        left = self._waiting_bytes - newest_bytes
        while left >= self._queue_bytes and len(self._queue) + len(self._first) > 1:
            item = (self._queue or self._first).popleft()
            left -= item.size_bytes
            self.dropped += 1
            yield item

    def flush(self, timeout_s: float) -> bool:
        """Waits until what is queued now is written, at full speed; whether all of it was, within the time.

        Blocks: for an executor's thread.
        """
        with self._changed:
            items = [*self._by_piece.values(), *self._telling]
            self._flushes += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: all(item.settled is not None for item in items), timeout=timeout_s
                )
            finally:
                self._flushes -= 1
        return all(item.settled for item in items)

    def close(self) -> None:
        """Ends the thread. What waits is given up, what is being written too."""
        with self._changed:
            self._closed = True
            given_up = self._take_all()
            self._changed.notify_all()
        for item in given_up:
            self._settle(item, False)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_PATIENCE_S)

    def _take_all(self) -> list[_Item]:
        """Empties the queue; its items count as dropped. Lock held."""
        items = [*self._first, *self._queue]
        self._first.clear()
        self._queue.clear()
        self.dropped += len(items)
        return items

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-write", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._first or self._queue)
                if self._closed:
                    return
                item = (self._first or self._queue).popleft()
            written, given_up = self._attempt(item)
            self._settle(item, written)
            for other in given_up:
                self._settle(other, False)

    def _attempt(self, item: _Item) -> tuple[bool, list[_Item]]:
        """Writes one piece; whether it has its name, and what is given up with it."""
        was_off = self._tier.off is not None
        try:
            if was_off:
                self._open_again()
            written = self._write(item.waiting)
        except _Interrupted:
            self.dropped += 1
            return False, []
        except OSError as problem:
            return False, self._turn_off(problem.strerror or str(problem))
        except Exception as problem:
            logger.exception("a record could not be written")
            return False, self._turn_off(f"{type(problem).__name__}: {problem}")
        if written:
            self.spills += 1
            if was_off:
                logger.info("the prompt cache is written to disk again")
        else:
            self.dropped += 1
        return written, []

    def _open_again(self) -> None:
        """Looks at the folder anew: it may have been unusable from the start. Raises OSError."""
        self._tier.open()
        if self._tier.off is not None:
            raise OSError(self._tier.off)

    def _turn_off(self, reason: str) -> list[_Item]:
        self.failed += 1
        logger.warning("the prompt cache is not written to disk for now: %s", reason)
        with self._changed:
            self._tier.off = reason
            self._retry_at = self._clock() + RETRY_S
            return self._take_all()

    def _settle(self, item: _Item, written: bool) -> None:
        """Lets go of a piece, then tells about it: who is told may offer it again at once."""
        with self._changed:
            if self._by_piece.get(item.waiting.piece) is item:
                del self._by_piece[item.waiting.piece]
                self._waiting_bytes -= item.size_bytes
            self._telling.append(item)
        with contextlib.suppress(Exception):
            self._wrote(item.waiting.piece, written)
        with self._changed:
            self._telling.remove(item)
            item.settled = written
            self._changed.notify_all()

    def _write(self, waiting: Waiting) -> bool:
        """Whether it is on disk, as write_piece says. Raises OSError, _Interrupted."""
        piece = waiting.piece
        if piece.kind == "slice":
            self._roomless.discard(piece.record.name)
        if self._roomless.isdisjoint((piece.record.parent, piece.record.name)) and write_piece(
            self._tier, waiting, self._step
        ):
            return True
        self._no_room_for(piece)
        return False

    def _no_room_for(self, piece: Piece) -> None:
        """Remembers where a prefix ends on disk for lack of room: what comes behind would be of no use there,
        and would have the beginning evicted for it."""
        if len(self._roomless) >= _MAX_ROOMLESS:
            self._roomless.clear()
        if piece.kind == "slice":
            self._roomless.add(piece.record.name)

    def _in_the_way(self) -> bool:
        return not self._flushes and self._busy()

    @contextlib.contextmanager
    def _step(self) -> Iterator[int]:
        """One step of writing: how many bytes it may be. After it, a rest in proportion to what it took, if
        rows decode and nobody waits. Raises _Interrupted."""
        begun = self._clock()
        yield BUSY_STEP_BYTES if self._in_the_way() else STEP_BYTES
        until = self._clock() + REST_PER_STEP * (self._clock() - begun)
        with self._changed:
            while not self._closed and (left := until - self._clock()) > 0 and self._in_the_way():
                self._rest(self._changed, min(left, _REST_POLL_S))
            if self._closed:
                raise _Interrupted
