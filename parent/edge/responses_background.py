"""Responses that run without their clients: each a task of the parent's, with any number of listeners.

A run is stored as queued before its client is answered, so that a restart finds it and can say that it
failed; from then on its record here is the truth, until its end is stored. Listeners come, leave and come
back at a number: they read what the run's recorder holds.

Owns the runs; of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from mlxpool.parent.faults import Damaged, Unavailable
from mlxpool.parent.history import records, streams
from mlxpool.parent.history.recorder import Recorder
from mlxpool.parent.history.records import Record
from mlxpool.shared.api import response_events
from mlxpool.shared.errors import ApiError, error

from .exchange import refusal
from .relay import maybe_apart
from .responses_answers import Answers, Prepared, preamble_of
from .sink import EVENT_STREAM, Sink

logger = logging.getLogger("mlxpool.history")

# Each holds a place in a model's queue and its stream in memory.
RUNS_LIMIT = 64
# All of them together: bodies, inputs and what was said. A lone one is let in whatever its size.
RUNS_BYTES = 256 * 2**20
# Another run ends sooner or later; a client need not ask every second.
RETRY_AFTER_S = 10.0

_INTERRUPTED = "the server was restarted while this response was under way; send it again"


def interrupted(record: Record) -> Record:
    """What becomes of a run that a predecessor of this process left."""
    return records.failed(record, error("shutting_down", _INTERRUPTED))


class Run:
    """One of them. Is the sink of its own answer."""

    def __init__(self, answers: Answers, prepared: Prepared, asked: str, request_id: str) -> None:
        """asked: the model's name as the client wrote it."""
        self._answers = answers
        self._prepared = prepared
        self._request_id = request_id
        self._final: Record | None = None
        self._is_begun = False  # its task has made its first step
        self._is_ending = False  # what it ends as is decided: nothing may interrupt that
        self._is_over = False  # nothing more is said
        self._ends_as: tuple[str, ApiError | None] = ("cancelled", None)
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.recorder = Recorder(self._keep)
        self._preamble = preamble_of(prepared, asked, self.recorder)
        self.id = self._preamble.response_id
        self.queued = prepared.record(msgspec.json.encode(self._preamble.begun("queued")), None)
        self.refused: ApiError | None = None
        self.started = False

    @property
    def held_bytes(self) -> int:
        """What it holds in memory."""
        resolved = self._prepared.resolved
        return len(resolved.body) + len(resolved.input or b"") + self.recorder.held_bytes

    @property
    def record(self) -> Record:
        """As of now."""
        if self._final is not None:
            return self._final
        if not self.started:
            return self.queued
        begun = msgspec.json.encode(self._preamble.begun())
        return msgspec.structs.replace(self.queued, status="in_progress", response=begun)

    def begin(self) -> asyncio.Task[None]:
        """Let it run. Its task ends when its end is recorded, and fails with nothing."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._task

    async def stop(self, status: str, err: ApiError | None = None) -> None:
        """End it now. Returns when its end is recorded, which may be another one, come before."""
        if self._task is not None and not self._task.done():
            if not self._is_begun:
                await asyncio.sleep(0)  # a task that is cancelled before its first step ends nothing
            if not self._is_ending:
                self._ends_as = (status, err)
                self._task.cancel()
            await asyncio.wait([self._task])

    async def follow(self, sink: Sink, after: int) -> None:
        """The stream's events above the number `after`, those to come too, to this sink."""
        recorder, place, skips, sent = self.recorder, 0, after >= 0, b""
        await sink.start(EVENT_STREAM)
        while True:
            news, is_over = self._news, self._is_over
            if place < recorder.dropped:
                said = "what comes next of this stream is no longer held; poll for the response instead"
                number = max(after, streams.last_number(sent)) + 1
                await sink.send(
                    response_events.event("error", number, code="server_error", message=said, param=None)
                )
                break
            pieces = recorder.pieces[place - recorder.dropped :]
            place += len(pieces)
            data = b"".join(pieces)
            if skips and data:
                data = await maybe_apart(len(data), streams.after, data, after)
                skips = not data
            if data:
                await sink.send(data)
                sent = data
            elif is_over:
                break
            elif not pieces:
                await news.wait()
        await sink.end()

    # ---- the sink of its own answer ---------------------------------------------------------------------

    async def start(self, headers: Mapping[str, str]) -> None:
        del headers  # they are the listeners' to get, and theirs are always the same
        self.started = True

    async def send(self, data: bytes) -> None:
        await self.recorder.passing(data)
        self._tell()

    async def end(self) -> None:
        self._tell()

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        del headers
        if status == 200:
            self.recorder.whole(body)
            for event in response_events.replay(msgspec.json.decode(body)):
                self.recorder.pieces.append(event)
        else:
            await self.recorder.end("failed", refusal(status, body))
        self._tell()

    def abandon(self) -> None:
        self._tell()

    # ---- inside -----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._is_begun = True
        ends_as: tuple[str, ApiError | None]
        try:
            await self._answers.carry(self._prepared, self._request_id, self, lambda _: self._preamble)
            ends_as = ("failed", error("internal_error", "the worker's stream had no end"))
        except asyncio.CancelledError:
            ends_as = self._ends_as
        except ApiError as err:
            self.refused = err
            ends_as = ("failed", err)
        except Exception:
            logger.exception("the background response %s", self.id)
            ends_as = ("failed", error("internal_error", "the server failed; its log says how"))
        self._is_ending = True
        try:
            await self.recorder.end(*ends_as)
        except Exception:
            logger.exception("the end of the background response %s", self.id)
        finally:
            if self._final is None:
                reason = ends_as[1] or error("internal_error", "the end of this response could not be made")
                self._keep(records.failed(self.queued, reason).response, None)
            self._answers.write(self._prepared, self._final)
            self._is_over = True
            self._tell()

    def _keep(self, response: bytes, events: tuple[bytes, ...] | None) -> None:
        self._final = self._answers.keep(self._prepared, response, events)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class Background:
    """The runs there are."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._runs: dict[str, Run] = {}
        self._closing = False
        answers.lookup.find_running = self.record

    def get(self, response_id: str) -> Run | None:
        """A run that has not ended."""
        return self._runs.get(response_id)

    def record(self, response_id: str) -> Record | None:
        """The record of a run that has not ended."""
        run = self._runs.get(response_id)
        return None if run is None else run.record

    async def begin(self, prepared: Prepared, asked: str, request_id: str) -> Run:
        """A run that goes on by itself. Raises ApiError where it can't: too many, or refused by the pool."""
        self._check_open()
        if len(self._runs) >= RUNS_LIMIT:
            raise error(
                "queue_full",
                f"{RUNS_LIMIT} responses run in the background already; wait for one, or cancel one",
                retry_after_s=RETRY_AFTER_S,
            )
        run = Run(self._answers, prepared, asked, request_id)
        if self._runs and run.held_bytes + sum(one.held_bytes for one in self._runs.values()) > RUNS_BYTES:
            raise error(
                "queue_full",
                f"responses that run in the background hold {RUNS_BYTES // 2**20} MiB together, and this one"
                " is too much beside them; wait for one, or cancel one",
                retry_after_s=RETRY_AFTER_S,
            )
        self._runs[run.id] = run
        try:
            if not await self._answers.store.put(run.queued):
                raise self._not_stored()
        except BaseException:
            del self._runs[run.id]
            raise
        try:
            self._check_open()
        except ApiError:
            del self._runs[run.id]
            await self._withdraw(run)
            raise
        task = run.begin()
        task.add_done_callback(lambda _: self._runs.pop(run.id, None))
        # One turn of the loop, in which the pool takes it or refuses it.
        await asyncio.sleep(0)
        if run.refused is not None:
            await asyncio.wait([task])
            await self._withdraw(run)
            raise run.refused
        return run

    async def close(self) -> None:
        """End what still runs, as failed."""
        self._closing = True
        err = error(
            "shutting_down", "the server was stopped while this response was under way; send it again"
        )
        await asyncio.gather(*(run.stop("failed", err) for run in list(self._runs.values())))

    def _check_open(self) -> None:
        if self._closing:
            raise error("shutting_down", "the server is stopping", retry_after_s=RETRY_AFTER_S)

    async def _withdraw(self, run: Run) -> None:
        """Its client is refused, and never hears its id."""
        try:
            await self._answers.store.delete(run.id)
        except (Unavailable, Damaged) as err:
            logger.warning("the refused background response %s stays stored: %s", run.id, err)

    def _not_stored(self) -> ApiError:
        reason = self._answers.store.figures.reason
        return ApiError(
            503,
            "internal_error",
            f"this response can't be stored now ({reason}), and one that runs in the background must be; try"
            " again, or send it without background",
            retry_after_s=RETRY_AFTER_S,
        )
