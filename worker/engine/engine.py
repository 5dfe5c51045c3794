"""The engine: one thread that owns the model and gives every request its tokens.

Its turn is always the same: take what the event loop handed over, drop rows whose client left, admit what
fits, prefill one chunk of one row, decode one step of all rows, hand the turn's events to the event loop
in one call. So a cancellation, a newcomer and a running stream each wait for at most a chunk and a step.
With nothing to do it sleeps on a condition. While somebody holds it (hold.py) it ends the rows that it has
let in, admits no others, and then rests.

Who owns what: the event loop calls `submit`, `cancel` and reads the counters; everything else belongs to
the thread. A row that fails ends alone, a forward pass that fails ends the rows that shared it. A fault of
the loop itself ends the process, loudly: a worker whose engine is gone must not look alive.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from mlxpool.shared.errors import ApiError
from mlxpool.worker.adapters.layers import Switch
from mlxpool.worker.cache.prompt_cache import Place, PromptCache
from mlxpool.worker.cache.sources import row_source
from mlxpool.worker.colibri.faults import Interrupted, ReadFault
from mlxpool.worker.colibri.pressure import LOOK_S
from mlxpool.worker.engine.admission import KvCost, holds
from mlxpool.worker.engine.answering import events_of, failure_of
from mlxpool.worker.engine.batch import DecodeBatch
from mlxpool.worker.engine.calls import Calls
from mlxpool.worker.engine.chunks import TARGET_S, ChunkWidth
from mlxpool.worker.engine.group import Sampled
from mlxpool.worker.engine.hold import Hold
from mlxpool.worker.engine.prefill import Prefills
from mlxpool.worker.engine.prompt import Prompt
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.streamed import Streamed
from mlxpool.worker.engine.terms import Counters, Limits, Loaded
from mlxpool.worker.text.events import Event, Failure

# Exit code of a worker whose engine thread died: not one that a shell or a signal uses.
ENGINE_DIED_EXIT_CODE = 70

# MLX keeps freed buffers for reuse; caches that grow leave ever larger ones behind. Given back this often
# while decoding goes on, and whenever the engine falls idle.
_CLEAR_CACHE_STEPS = 512

# What a row that could say its first token waits for others that are about to: eight short prompts on a CPU.
_FIRST_WAIT_S = 4 * TARGET_S

# The figures of memory are for people: they may be a few steps old while nothing else happens.
_READ_MEMORY_STEPS = 16


_T = TypeVar("_T")


class Engine:
    """Start it once. `load` runs on its thread and gives the model; `loaded` resolves when it is done.

    open_cache: makes the model's prompt cache, on its thread too; None where there is none.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        limits: Limits,
        width: ChunkWidth,
        open_cache: Callable[[Loaded], PromptCache | None] = lambda _: None,
    ) -> None:
        self.counters = Counters()
        self.width = width
        self._load = load
        self._open_cache = open_cache
        self.cache: PromptCache | None = None  # from `loaded` on
        self.streamed: Streamed | None = None  # from `loaded` on, of a model whose experts are streamed
        self._switch: Switch | None = None  # from `loaded` on; the engine thread's own
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Loaded] = self._loop.create_future()
        self._wake = threading.Condition()
        self._arrived: deque[Row] = deque()  # guarded by _wake
        self._nudged = False  # guarded by _wake: a mark was set, look before sleeping
        self._owed = 0  # rows not ended yet; event loop only
        self._submitted = 0  # event loop only
        self.hold = Hold(self._loop, self.nudge)
        self._calls = Calls(self._loop, self.nudge)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._stopping = False  # written by the event loop alone
        self._busy = False  # written by the engine thread alone
        # The engine thread's own:
        self._waiting: deque[Row] = deque()
        self._changes = 1  # grows when rows come, leave, or grow by a block
        self._room_made_at = self._read_at = 0  # changes, when room was made and memory was read
        self._outbox: list[tuple[Row, list[Event]]] = []
        self._ended = 0  # rows in the outbox that are over
        self._prefilled = 0.0  # since the last step, in chunks

    # Event loop side

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the turn it is in. Rows that are left hear nothing more."""
        self._stopping = True
        self.nudge()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, at most so long."""
        self._thread.join(timeout_s)

    def submit(self, row: Row) -> None:
        """Hand a row over; its sink gets all of its events, the last one a Finish or a Failure."""
        self.submit_all([row])

    def submit_all(self, rows: Sequence[Row]) -> None:
        """Hand rows over that arrive together, such as the choices of one request."""
        self._owed += len(rows)
        for row in rows:
            self._submitted += 1
            row.number = self._submitted
        with self._wake:
            self._arrived.extend(rows)
            self._wake.notify()

    def cancel(self, row: Row) -> None:
        """The client left: nothing more of this row is computed. Its sink hears nothing any more.

        Harmless for a row that has ended.
        """
        row.cancelled = True
        self.nudge()

    def nudge(self) -> None:
        """Make the engine look around before it sleeps. From any thread."""
        with self._wake:
            self._nudged = True
            self._wake.notify()

    async def call(self, function: Callable[[], _T]) -> _T:
        """Run something on the engine's thread, between two turns. Raises what it raises."""
        return await self._calls.ask(function)

    @property
    def switch(self) -> Switch:
        """Over the loaded model, for calls on the engine's thread."""
        assert self._switch is not None
        return self._switch

    @property
    def busy(self) -> bool:
        """Whether rows are running."""
        return self._busy

    @property
    def progress(self) -> int:
        """Moves whenever work is done: steps, chunks, layers of streamed experts, records read from disk."""
        moved = self.counters.progress + (0 if self.cache is None else self.cache.progress)
        return moved + (0 if self.streamed is None else self.streamed.progress)

    @property
    def pending(self) -> int:
        """Rows the engine still owes work to."""
        return self._owed

    @property
    def asked(self) -> int:
        """Calls it still owes an answer."""
        return self._calls.asked

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
            # Without a loop there is nobody to tell: the process is on its way out.
            if self._loop.is_closed():
                return
            traceback.print_exc()
            sys.stderr.write("the engine thread died; the worker ends\n")
            sys.stderr.flush()
            os._exit(ENGINE_DIED_EXIT_CODE)

    def _run(self) -> None:
        try:
            loaded = self._load()
            self.cache = cache = self._open_cache(loaded)
        except Exception as err:
            self._loop.call_soon_threadsafe(self.loaded.set_exception, err)
            return
        self._switch = switch = Switch(loaded.model)
        eager = loaded.stream is not None
        batch = DecodeBatch(switch, loaded.make_cache, loaded.kv, self._keep, eager, loaded.draft)
        streamed = self.streamed = (
            None if loaded.stream is None else Streamed(loaded.stream, lambda: self._stopping)
        )
        if eager and self._limits.batch > 1:
            # They would share no experts, and finding out whether they may share passes reads some.
            batch.shares = False
        pads = False if eager else None
        prefills = Prefills(
            switch, loaded.make_cache, self.width, cache, pads, self._check_weights, gives_back=eager
        )
        self._loop.call_soon_threadsafe(self.loaded.set_result, loaded)
        steps = rested = 0
        while not self._stopping:
            term = self.hold.term
            self._busy = bool(batch.rows or prefills.rows)
            # Where all that runs waits for the disk there is nothing to do either, until a reader says so.
            idle = not (batch.rows or prefills.runnable or (self._may_admit(term) and not prefills.rows))
            if idle and not self._arrived:
                switch.under(None)  # what is unmounted now is held no longer
                if self._limits.batch > 1 and not term:
                    batch.try_sharing()
                while cache is not None and not (term or self._arrived or self._nudged) and cache.gather():
                    pass
            calls = self._take(idle)
            term = self.hold.term
            self._drop_cancelled(batch, prefills)
            # Who cancels a row and then calls finds in the prompt cache what the row held.
            for run in calls:
                run()
            prefills.advance()
            self._make_room(batch, prefills, loaded.kv)
            self._admit(batch, prefills, loaded.kv, term)
            self._busy = bool(batch.rows or prefills.rows)
            # A pass may take a minute, and what runs is told meanwhile.
            self.counters.rows = len(batch.rows) + len(prefills.rows)
            self._prefill(batch, prefills, loaded.kv)
            if batch.rows and not self._holds_back(batch, prefills):
                self._decode(batch, prefills.reserved_bytes(loaded.kv))
                steps += 1
                if steps % _CLEAR_CACHE_STEPS == 0:
                    mx.clear_cache()
            if self._changes != self._read_at or prefills.rows or steps % _READ_MEMORY_STEPS == 0:
                self._read_at = self._changes
                self._read_memory(batch, prefills, loaded.kv)
            self._flush()
            if cache is not None:
                cache.maintain()
            if streamed is not None:
                streamed.between_passes(held=bool(term))
            if term != rested and not (batch.rows or prefills.rows or self._may_admit(term)):
                rested = term
                if term:
                    # What the models' buffers leave is for whoever has the GPU now.
                    mx.clear_cache()
                    self.hold.rest(term)
        if loaded.stream is not None:
            loaded.stream.close()

    def _may_admit(self, term: int) -> bool:
        """Whether the first row that waits may be let in: one that was already, whoever holds the engine."""
        return bool(self._waiting) and (not term or self._waiting[0].admitted_s > 0)

    def _take(self, idle: bool) -> Sequence[Callable[[], None]]:
        """Move arrived rows into the queue; sleep while there is nothing at all to do. Returns the calls that
        came until then."""
        with self._wake:
            if idle and not self._arrived and not self._nudged:
                mx.clear_cache()
                self._wake.wait_for(lambda: self._arrived or self._nudged, self._rest_s())
            self._waiting.extend(self._arrived)
            self._arrived.clear()
            self._nudged = False
        return self._calls.take()

    def _rest_s(self) -> float | None:
        """How long the engine may sleep: until the prompt cache or the memory wants a look."""
        rest_s = None if self.cache is None else self.cache.rest_s
        if self.streamed is None:
            return rest_s
        return LOOK_S if rest_s is None else min(LOOK_S, rest_s)

    def _keep(self, row: Row, caches: list[Any], place: int | None, length: int) -> None:
        """A row leaves the batch: what its caches hold goes into the prompt cache. place: where the row is in
        caches that several share, None for its own."""
        if self.cache is not None and (self.streamed is None or self.streamed.intact):
            source = row_source(caches, place, self.cache.layout)
            ids = np.array(row.ids[:length], dtype=np.uint32)
            held = Place(ids, length, row.plan.namespace, row.plan.boundaries)
            self.cache.keep(held, source, end=True, state=True, lasting=True)

    def _drop_cancelled(self, batch: DecodeBatch, prefills: Prefills) -> None:
        # Looked at once: a mark may be set at any moment, and a row that leaves must also have ended.
        gone = [row for row in (*self._waiting, *prefills.rows, *batch.rows) if row.cancelled]
        if not gone:
            return
        for row in gone:
            self.counters.cancelled += 1
            self._end(row, [])
        self._waiting = deque(row for row in self._waiting if row not in gone)
        prefills.discard(gone)
        self._leave(batch, gone)

    def _make_room(self, batch: DecodeBatch, prefills: Prefills, cost: KvCost) -> None:
        """Rows without a limit that have grown out of the KV pool: the youngest wait again, at the front."""
        if self._changes == self._room_made_at:
            return
        self._room_made_at = self._changes
        running = sorted([*batch.rows, *prefills.rows], key=lambda row: row.number)
        outgrown = running[self._held(running, cost) :]
        if not outgrown:
            return
        prefills.discard(outgrown)
        self._leave(batch, outgrown)
        for row in reversed(outgrown):
            # One that failed on its way out has ended.
            if not row.ended:
                row.requeue()
                self._waiting.appendleft(row)

    def _held(self, rows: Sequence[Row], cost: KvCost) -> int:
        return holds([row.projection() for row in rows], cost, self._limits.kv_pool_bytes)

    def _has_room(self, rows: Sequence[Row], cost: KvCost, more_bytes: int) -> bool:
        """Whether the pool has `more_bytes` beside what these rows may grow to."""
        grown_bytes = sum(cost.row_bytes(row.projection().tokens()) for row in rows)
        return grown_bytes + more_bytes <= self._limits.kv_pool_bytes

    def _admit(self, batch: DecodeBatch, prefills: Prefills, cost: KvCost, term: int) -> None:
        """Waiting rows, first come first served, while there is a place and room in the KV pool.

        Prompts that are kept for rows to come give way to rows that run.
        """
        while self._may_admit(term) and len(batch.rows) + len(prefills.rows) < self._limits.batch:
            row = self._waiting[0]
            rows = [*batch.rows, *prefills.rows, row]
            if self._held(rows, cost) < len(rows):
                break
            self._waiting.popleft()
            row.admitted_s = row.admitted_s or time.perf_counter()
            if self.streamed is not None:
                self.streamed.admitted(row)
            try:
                self._check_weights()
            except ApiError as err:
                self._fail(row, err)
                continue
            prefills.attach(row)
            self._changes += 1
        if kept_bytes := prefills.kept_bytes(cost):
            room = self._has_room([*batch.rows, *prefills.rows], cost, kept_bytes)
            prefills.drop_kept(self._waiting if room else ())
            self._changes += 1

    def _prefill(self, batch: DecodeBatch, prefills: Prefills, cost: KvCost) -> None:
        """One chunk of one prompt, or short ones in one pass; rows whose prompt is done join the batch."""
        prompt = prefills.next()
        if prompt is None:
            return
        together = prefills.together(prompt)
        if len(together) > 1 and prefills.run_together(together):
            self._prefilled += len(together) * max(done.end for done in together) / self.width.tokens
            self.counters.progress += 1
            for done in together:
                self._hand_over(done, batch, prefills, cost)
            return
        # Rows of one prompt wait for the same.
        alone = not (batch.rows or self._waiting or len(prefills.rows) > len(prompt.rows))
        end = prefills.cut(prompt, alone)
        try:
            if end > prompt.done:
                self._prefilled += (end - prompt.done) / self.width.at(prompt.done)
                self._passes(prompt.rows)
                prefills.run(prompt, end, alone)
                self.counters.progress += 1
        except Exception as err:
            self._fail_prompt(prompt, prefills, err)
            return
        if prompt.complete:
            self._hand_over(prompt, batch, prefills, cost)

    def _hand_over(self, prompt: Prompt, batch: DecodeBatch, prefills: Prefills, cost: KvCost) -> None:
        """The rows of a complete prompt join the batch; it is kept for rows that still wait for a place."""
        try:
            keep = any(map(prompt.serves, self._waiting)) and self._has_room(
                [*batch.rows, *prefills.rows], cost, prefills.kept_bytes(cost) + cost.row_bytes(prompt.done)
            )
            joining = prefills.hand_over(prompt, keep)
        except Exception as err:
            self._fail_prompt(prompt, prefills, err)
            return
        for row in joining:
            row.prefilled_s = row.prefilled_s or time.perf_counter()
            batch.join(row)

    def _passes(self, rows: Sequence[Row]) -> None:
        """The passes that follow are for these rows."""
        if self.streamed is not None:
            self.streamed.passes(rows)

    def _check_weights(self) -> None:
        """Raises ApiError where what passes compute is no longer of the weights that were loaded."""
        if self.streamed is not None:
            self.streamed.check()

    def _fail_prompt(self, prompt: Prompt, prefills: Prefills, err: Exception) -> None:
        if not isinstance(err, Interrupted | ReadFault | ApiError):
            traceback.print_exception(err)
        for row in prompt.rows:
            self._fail(row, err)
        prefills.drop(prompt, faulty=True)

    def _holds_back(self, batch: DecodeBatch, prefills: Prefills) -> bool:
        """Whether a step would come too early, because short prompts are about to join it.

        A step takes nearly as long for one row as for eight. Streams that have begun wait for one chunk, as
        beside a long prompt; rows that have nothing to say yet wait for each other.
        """
        # Rows that came with these, but later by a chunk, are not prompts yet.
        if not self._arrived and not prefills.completes_one(1.0):
            return False
        rows = batch.rows
        if any(row.primed for row in rows):
            return prefills.completes_one(1.0 - self._prefilled)
        return time.perf_counter() - min(row.prefilled_s for row in rows) < _FIRST_WAIT_S

    def _decode(self, batch: DecodeBatch, reserved_bytes: int) -> None:
        """A step of all rows; what becomes known is said while the forward pass runs."""
        began_s = time.perf_counter()
        self._say(batch, batch.take_last())
        if batch.rows:
            self._passes(batch.rows)
            ended = self._say(batch, batch.step(self._limits.kv_pool_bytes - reserved_bytes))
            batch.finish()
            self._leave(batch, ended)
        self._prefilled = 0.0
        self.counters.progress += 1
        self.counters.decode_s += time.perf_counter() - began_s

    def _say(self, batch: DecodeBatch, known: Iterable[Sampled]) -> list[Row]:
        """Turn tokens into events; returns the rows that are over with them."""
        ended: list[Row] = []
        for sampled in known:
            row = sampled.row
            row.first_s = row.first_s or time.perf_counter()
            self.counters.tokens += 1
            try:
                self._check_weights()
                events, over = events_of(sampled, "turns" if batch.shares is False else "batch")
            except Exception as err:
                if not isinstance(err, ApiError):
                    traceback.print_exc()
                self._fail(row, err)
                ended.append(row)
                continue
            if over:
                self.counters.prompt_tokens += len(row.plan.ids)
                self._end(row, events)
                ended.append(row)
                continue
            if events:
                self._outbox.append((row, events))
            if row.at_block_end:
                self._changes += 1
                batch.unsettle()
        return ended

    def _leave(self, batch: DecodeBatch, leaving: Sequence[Row]) -> None:
        """Rows leave the batch, and with them those that a fault took out of it."""
        gone = list(leaving)
        while True:
            self._changes += bool(gone)
            batch.leave(gone)
            failed = batch.take_failed()
            if not failed:
                return
            for rows, err in failed:
                for row in rows:
                    if not row.ended:
                        self._fail(row, err)
            gone = [row for rows, _ in failed for row in rows]

    def _fail(self, row: Row, err: Exception) -> None:
        if isinstance(err, Interrupted):
            # Its client left, or the worker ends: nobody is there to be told.
            self.counters.cancelled += 1
            self._end(row, [])
            return
        if self.streamed is not None:
            err = self.streamed.explained(err)
        self.counters.errors += 1
        self._end(row, [Failure(failure_of(err))])

    def _end(self, row: Row, events: list[Event]) -> None:
        if self.streamed is not None:
            self.streamed.ended(row)
        row.end()
        self._changes += 1
        self._ended += 1
        self._outbox.append((row, events))

    def _read_memory(self, batch: DecodeBatch, prefills: Prefills, cost: KvCost) -> None:
        counters = self.counters
        counters.rows = len(batch.rows) + len(prefills.rows)
        counters.kv_used_bytes = batch.held_bytes + prefills.held_bytes(cost)
        counters.active_bytes = mx.get_active_memory()
        counters.peak_bytes = mx.get_peak_memory()
        counters.cache_bytes = mx.get_cache_memory()

    def _flush(self) -> None:
        """One hand-over per turn, however many rows had something to say."""
        if self._outbox:
            self._loop.call_soon_threadsafe(self._deliver, self._outbox, self._ended)
            self._outbox, self._ended = [], 0
