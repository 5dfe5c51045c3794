"""The engine: one thread that owns the model and gives every request its tokens.

Its turn is always the same: take what the event loop handed over, drop rows whose client left, admit what
fits, prefill one chunk of one row, decode one step of all rows, hand the turn's events to the event loop
in one call. So a cancellation, a newcomer and a running stream each wait for at most a chunk and a step.
With nothing to do it sleeps on a condition.

Who owns what: the event loop calls `submit`, `cancel` and reads the counters; everything else belongs to
the thread. A row that fails ends alone. A step that fails ends the rows that were in it, and the batch
starts anew. A fault of the loop itself ends the process, loudly: a worker whose engine is gone must not
look alive.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import msgspec

from mlxpool.shared.errors import error
from mlxpool.worker.engine.admission import KvCost, holds
from mlxpool.worker.engine.batch import DecodeBatch
from mlxpool.worker.engine.chunks import ChunkWidth, next_turn
from mlxpool.worker.engine.row import Row
from mlxpool.worker.text.events import Event, Failure, Finish, FinishReason, Usage

# Exit code of a worker whose engine thread died: not one that a shell or a signal uses.
ENGINE_DIED_EXIT_CODE = 70

# MLX keeps freed buffers for reuse; caches that grow leave ever larger ones behind. Given back this often
# while decoding goes on, and whenever the engine falls idle.
_CLEAR_CACHE_STEPS = 512


class Loaded(msgspec.Struct, frozen=True):
    """What `load` hands to the engine, made on the engine's thread. make_cache: fresh caches of one row."""

    model: Any
    make_cache: Callable[[], list[Any]]
    kv: KvCost
    weights_bytes: int
    dtype: str


class Limits(msgspec.Struct, frozen=True):
    """batch: rows that decode together. kv_pool_bytes: what all of them may hold."""

    batch: int
    kv_pool_bytes: int


class Counters(msgspec.Struct):
    """Written by the engine thread, read by anyone: plain numbers that only grow, or the latest reading."""

    progress: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    decode_s: float = 0.0
    cancelled: int = 0
    errors: int = 0
    rows: int = 0
    kv_used_bytes: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0


class Engine:
    """Start it once. `load` runs on its thread and gives the model; `loaded` resolves when it is done."""

    def __init__(self, load: Callable[[], Loaded], limits: Limits, width: ChunkWidth) -> None:
        self.counters = Counters()
        self.width = width
        self._load = load
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._wake = threading.Condition()
        self._arrived: deque[Row] = deque()  # guarded by _wake
        self._nudged = False  # guarded by _wake: a mark was set, look before sleeping
        self._owed = 0  # rows not ended yet; event loop only
        self._submitted = 0  # event loop only
        # The engine thread's own:
        self._waiting: deque[Row] = deque()
        self._prefilling: list[Row] = []
        self._outbox: list[tuple[Row, list[Event]]] = []
        self._ended = 0  # rows in the outbox that are over

    # Event loop side

    def start(self) -> None:
        threading.Thread(target=self._main, name="engine", daemon=True).start()

    def submit(self, row: Row) -> None:
        """Hand a row over; its sink gets all of its events, the last one a Finish or a Failure."""
        self._owed += 1
        self._submitted += 1
        row.number = self._submitted
        with self._wake:
            self._arrived.append(row)
            self._wake.notify()

    def cancel(self, row: Row) -> None:
        """The client left: nothing more of this row is computed. Its sink hears nothing any more.

        Harmless for a row that has ended.
        """
        row.cancelled = True
        with self._wake:
            self._nudged = True
            self._wake.notify()

    @property
    def pending(self) -> int:
        """Rows the engine still owes work to."""
        return self._owed

    def _deliver(self, outbox: Sequence[tuple[Row, list[Event]]], ended: int) -> None:
        self._owed -= ended
        for row, events in outbox:
            if not row.cancelled:
                row.sink(events)

    # Engine thread

    def _main(self) -> None:
        try:
            self._run()
        except BaseException:
            traceback.print_exc()
            sys.stderr.write("the engine thread died; the worker ends\n")
            sys.stderr.flush()
            os._exit(ENGINE_DIED_EXIT_CODE)

    def _run(self) -> None:
        try:
            loaded = self._load()
        except Exception as err:
            self._loop.call_soon_threadsafe(self.loaded.set_exception, err)
            return
        batch = DecodeBatch(loaded.model, loaded.make_cache, loaded.kv)
        self._loop.call_soon_threadsafe(self.loaded.set_result, loaded)
        steps = 0
        while True:
            self._take(idle=not (self._waiting or self._prefilling or batch.rows))
            self._drop_cancelled(batch)
            self._make_room(batch, loaded)
            self._admit(batch, loaded)
            self._prefill(batch, loaded)
            if batch.rows:
                self._decode(batch, loaded)
                steps += 1
                if steps % _CLEAR_CACHE_STEPS == 0:
                    mx.clear_cache()
            self._read_memory(batch, loaded)
            self._flush()

    def _take(self, idle: bool) -> None:
        """Move arrived rows into the queue; sleep while there is nothing at all to do."""
        with self._wake:
            if idle and not self._arrived and not self._nudged:
                mx.clear_cache()
                self._wake.wait_for(lambda: self._arrived or self._nudged)
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            self._nudged = False

    def _drop_cancelled(self, batch: DecodeBatch) -> None:
        # Looked at once: a mark may be set at any moment, and a row that leaves must also have ended.
        gone = [row for row in (*self._waiting, *self._prefilling, *batch.rows) if row.cancelled]
        if not gone:
            return
        for row in gone:
            self.counters.cancelled += 1
            self._end(row, [])
        self._waiting = deque(row for row in self._waiting if row not in gone)
        self._prefilling = [row for row in self._prefilling if row not in gone]
        self._leave(batch, gone)

    def _make_room(self, batch: DecodeBatch, loaded: Loaded) -> None:
        """Rows without a limit that have grown out of the KV pool: the youngest wait again, at the front."""
        running = sorted([*batch.rows, *self._prefilling], key=lambda row: row.number)
        outgrown = running[self._held(running, loaded) :]
        if not outgrown:
            return
        self._prefilling = [row for row in self._prefilling if row not in outgrown]
        self._leave(batch, outgrown)
        for row in reversed(outgrown):
            row.requeue()
            self._waiting.appendleft(row)

    def _held(self, rows: Sequence[Row], loaded: Loaded) -> int:
        return holds([row.projection() for row in rows], loaded.kv, self._limits.kv_pool_bytes)

    def _admit(self, batch: DecodeBatch, loaded: Loaded) -> None:
        """Waiting rows, first come first served, while there is a place and room in the KV pool."""
        while self._waiting and len(batch.rows) + len(self._prefilling) < self._limits.batch:
            row = self._waiting[0]
            rows = [*batch.rows, *self._prefilling, row]
            if self._held(rows, loaded) < len(rows):
                return
            self._waiting.popleft()
            row.cache = loaded.make_cache()
            row.admitted_s = row.admitted_s or time.perf_counter()
            self._prefilling.append(row)

    def _prefill(self, batch: DecodeBatch, loaded: Loaded) -> None:
        """One chunk of one row; rows whose prompt is done join the batch."""
        if not self._prefilling:
            return
        row = self._prefilling[
            next_turn(
                [other.prefill_end - other.prefilled for other in self._prefilling],
                [other.passed_over for other in self._prefilling],
                self.width.tokens,
            )
        ]
        for other in self._prefilling:
            other.passed_over += 1
        row.passed_over = 0
        end = self.width.end(row.prefilled, row.prefill_end, row.token_s)
        try:
            if end > row.prefilled:
                self._run_chunk(row, end, loaded.model)
        except Exception as err:
            traceback.print_exc()
            self._prefilling.remove(row)
            self._fail(row, err)
            return
        if row.prefilled == row.prefill_end:
            self._prefilling.remove(row)
            self._join(batch, row)

    def _join(self, batch: DecodeBatch, row: Row) -> None:
        rows = [*batch.rows, row]
        row.prefilled_s = row.prefilled_s or time.perf_counter()
        try:
            batch.join(row)
        except Exception as err:
            traceback.print_exc()
            self._fail_batch(batch, rows, err)

    def _run_chunk(self, row: Row, end: int, model: Any) -> None:
        chunk = row.ids[row.prefilled : end]
        began_s = time.perf_counter()
        model(mx.array([chunk], dtype=mx.uint32), cache=row.cache)
        mx.eval([cache.state for cache in row.cache])
        elapsed_s = time.perf_counter() - began_s
        self.width.observe(len(chunk), elapsed_s)
        row.token_s = elapsed_s / len(chunk)
        row.prefilled = end
        self.counters.progress += 1
        if end == row.prefill_end:
            mx.clear_cache()

    def _decode(self, batch: DecodeBatch, loaded: Loaded) -> None:
        began_s = time.perf_counter()
        self._hand_out(batch, batch.take_last)
        if batch.rows:
            prefilling = sum(loaded.kv.row_bytes(row.projection().tokens()) for row in self._prefilling)
            self._hand_out(batch, lambda: batch.step(self._limits.kv_pool_bytes - prefilling))
        self.counters.progress += 1
        self.counters.decode_s += time.perf_counter() - began_s

    def _hand_out(self, batch: DecodeBatch, advance: Callable[[], list[tuple[Row, int]]]) -> None:
        """Advance the batch and turn the tokens that became known into events."""
        rows = list(batch.rows)
        try:
            known = advance()
        except Exception as err:
            traceback.print_exc()
            self._fail_batch(batch, rows, err)
            return
        ended = []
        for row, token in known:
            try:
                if self._emit(row, token):
                    ended.append(row)
            except Exception as err:
                traceback.print_exc()
                self._fail(row, err)
                ended.append(row)
        self._leave(batch, ended)

    def _leave(self, batch: DecodeBatch, leaving: Sequence[Row]) -> None:
        """Rows that are over leave the batch. What a step left pending may fail here, for those that stay."""
        staying = [row for row in batch.rows if row not in leaving]
        try:
            batch.leave(leaving)
        except Exception as err:
            traceback.print_exc()
            self._fail_batch(batch, staying, err)

    def _emit(self, row: Row, token: int) -> bool:
        """Turn a token into events; True when the row ends with it. An eos wins over the length limit."""
        row.emitted += 1
        row.ids.append(token)
        self.counters.tokens += 1
        reason: FinishReason | None = None
        events: list[Event] = []
        if token in row.plan.eos_ids:
            reason = "stop"
        else:
            events += row.text.push(token)
            if row.text.over:
                reason = "stop"
            elif row.emitted >= row.plan.max_tokens:
                reason = "length"
        if reason is not None and not row.text.over:
            events += row.text.flush()
            reason = "stop" if row.text.over else reason
        if reason == "stop" and row.text.called:
            reason = "tool_calls"
        if reason is None:
            if events:
                self._outbox.append((row, events))
            return False
        self.counters.prompt_tokens += len(row.plan.ids)
        events += [Usage(len(row.plan.ids), row.emitted), Finish(reason, row.text.stop)]
        self._end(row, events)
        return True

    def _fail(self, row: Row, err: Exception) -> None:
        self.counters.errors += 1
        failure = error("internal_error", f"the engine failed on this request: {type(err).__name__}: {err}")
        self._end(row, [Failure(failure)])

    def _fail_batch(self, batch: DecodeBatch, rows: Sequence[Row], err: Exception) -> None:
        """A step failed: these rows were in it, and the caches may be half-written."""
        batch.clear()
        for row in rows:
            self._fail(row, err)

    def _end(self, row: Row, events: list[Event]) -> None:
        row.cache = []
        self._ended += 1
        self._outbox.append((row, events))

    def _read_memory(self, batch: DecodeBatch, loaded: Loaded) -> None:
        counters = self.counters
        counters.rows = len(batch.rows) + len(self._prefilling)
        prefilled = sum(loaded.kv.row_bytes(row.prefilled) for row in self._prefilling)
        counters.kv_used_bytes = batch.held_bytes + prefilled
        counters.active_bytes = mx.get_active_memory()
        counters.peak_bytes = mx.get_peak_memory()
        counters.cache_bytes = mx.get_cache_memory()

    def _flush(self) -> None:
        """One hand-over per turn, however many rows had something to say."""
        if self._outbox:
            self._loop.call_soon_threadsafe(self._deliver, self._outbox, self._ended)
            self._outbox, self._ended = [], 0
