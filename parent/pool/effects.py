"""The scheduler's effects made real: processes, sockets and the futures that requests wait on.

`PoolEffects` carries out what `Scheduler` decides and turns what processes do into scheduler events. It
decides nothing: every branch here is about how, never about whether. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from mlxpool.shared.control import Failed, Heartbeat, Imported, Launch, Loading, Status
from mlxpool.shared.errors import ApiError

from . import native_lease
from .expert_tally import ExpertTally
from .leases import Lease
from .process import WorkerProcess
from .prompt_caches import PromptCaches
from .scheduler import Scheduler
from .state import ModelSpec, Ticket
from .upstream import Upstream, UpstreamError
from .worker_log import RotatingLog, log_path

logger = logging.getLogger("mlxpool.pool")

# A worker whose socket listens answers /health at once; its loop may be busy for one first forward.
READY_PROBE_TIMEOUT_S = 10.0
# A worker that says why it failed ends next; its last lines are complete then.
FAILED_EXIT_WAIT_S = 1.0
# Lines of a failed worker's log that go into the error a client reads.
REASON_TAIL_LINES = 5
# The lines of a traceback that are not indented; then the exception's own, class and text.
_TRACEBACK_LINES = (
    "Traceback (most recent call last)",
    "During handling of the above exception",
    "The above exception was the direct cause",
    "NoneType: None",
)
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*: (.+)")
RECENT_EVENTS = 200
# Where a worker writes before it has a model; no model's name begins with a dot.
SPARE_LOG = ".spare"


class CannotLaunch(Exception):
    """There is nothing to tell a worker to load any more; its text says why."""


class PoolEvent(msgspec.Struct, frozen=True):
    """Something that happened to a model. time: unix seconds."""

    time: float
    event: str
    model: str
    detail: str


@dataclass
class Grant:
    """What a waiting request holds: its ticket, and the futures that settle it.

    granted: the worker to talk to, or the ApiError the request is refused with. revoked: the error that a
    granted request must end with; on_revoke is called once when it is set.
    """

    ticket: Ticket
    granted: asyncio.Future[Worker]
    revoked: ApiError | None = None
    on_revoke: Callable[[], None] | None = None


@dataclass
class Worker:
    """A process and the connections that reach it."""

    process: WorkerProcess
    spec: ModelSpec
    upstream: Upstream
    log: RotatingLog
    reason: str | None = None  # its own words for why it ends
    lease: asyncio.Task[None] | None = None  # holds the connection that is its lease
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    tokens: int = 0  # as of its last heartbeat, at `heard` (monotonic)
    heard: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def number(self) -> int:
        """Its worker number."""
        return self.process.worker


@dataclass
class Listeners:
    """Whoever shows the pool to people. Called on the event loop."""

    event: Callable[[PoolEvent], None] = lambda _: None
    log_line: Callable[[str, str], None] = lambda _, __: None


def _measure(known: Worker, tokens: int, now: float) -> None:
    """Tokens a second since the last heartbeat."""
    if known.heard and now > known.heard:
        known.tokens_per_s = round((tokens - known.tokens) / (now - known.heard), 1)
    known.tokens, known.heard = tokens, now


def last_words(lines: Sequence[str], reason: str) -> list[str]:
    """The last lines of a worker that tell a client more than its reason does.

    What Python prints around an exception is for who reads the log: a client gets no frames of a traceback.
    """
    telling = [line for line in lines if not _is_traceback(line) and not _repeats(line, reason)]
    return telling[-REASON_TAIL_LINES:]


def _is_traceback(line: str) -> bool:
    return line[:1].isspace() or line.startswith(_TRACEBACK_LINES)


def _repeats(line: str, reason: str) -> bool:
    exception = _EXCEPTION.fullmatch(line)
    return (exception[1] if exception else line) in reason


class PoolEffects:
    """Effects and Reports. `scheduler` is set right after both are made."""

    scheduler: Scheduler

    def __init__(
        self,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        run_folder: Path,
        log_folder: Path,
        drain_timeout_s: float,
        cache_bytes: int,
        launch: Callable[[str, str, int], Launch],
        changed: Callable[[], None],
        listeners: Listeners,
    ) -> None:
        """argv, env: every worker's. cache_bytes: of memory, for the prompts of all. launch: (model, socket
        path, its share of cache_bytes) → Launch, or raises CannotLaunch. changed: called after events.
        """
        self._argv = argv
        self._env = env
        self._run_folder = run_folder
        self._log_folder = log_folder
        self.drain_timeout_s = drain_timeout_s
        self._launch = launch
        self._changed = changed
        self._listeners = listeners
        self._loop = asyncio.get_running_loop()
        self._logs: dict[str, RotatingLog] = {}
        self.workers: dict[int, Worker] = {}
        self.caches = PromptCaches(cache_bytes, self._upstream, self._background)
        self.experts = ExpertTally()
        self.grants: dict[int, Grant] = {}
        self._lent: dict[int, asyncio.Future[None]] = {}
        self.recent: collections.deque[PoolEvent] = collections.deque(maxlen=RECENT_EVENTS)

    # ---- effects ----------------------------------------------------------------------------------------

    def now(self) -> float:
        """The event loop's own clock, so that timers agree with it."""
        return time.monotonic()

    def start(self, worker: int, spec: ModelSpec, go: bool) -> None:
        """Spawn a worker; see Effects."""
        log = self._log_of(spec.name)
        socket = self._run_folder / f"{worker}.sock"
        process = WorkerProcess(worker, spec.name, socket, log, self)
        self.workers[worker] = Worker(process, spec, Upstream(str(socket)), log)
        self._run_folder.mkdir(mode=0o700, exist_ok=True)  # something may have cleared it away
        log.write(f"--- worker {worker} of {spec.name or 'no model yet'} starts\n".encode())
        try:
            process.spawn(self._argv, self._env)
        except OSError as err:
            # The scheduler is in the middle of a decision: tell it afterwards.
            self._loop.call_soon(self.exited, worker, f"can't start a worker: {err}")
            return
        if go:
            self.go(worker, spec)

    def start_spare(self, worker: int) -> None:
        """Spawn a worker that has no model yet."""
        self.start(worker, self.scheduler.spare.spec, False)

    def adopt(self, worker: int, spec: ModelSpec) -> None:
        """The spare is this model's from now on; so is what it writes."""
        known = self.workers[worker]
        known.spec = spec
        known.log = self._log_of(spec.name)
        known.log.write(f"--- worker {worker} of {spec.name} was the spare\n".encode())
        known.process.adopt(spec.name, known.log)

    def go(self, worker: int, spec: ModelSpec) -> None:
        """Send the Launch."""
        process = self.workers[worker].process
        share = self.caches.launched(worker, spec.name)
        try:
            launch = self._launch(spec.name, str(process.socket), share)
        except CannotLaunch as err:
            # As with a spawn that can't: afterwards, and never out of the middle of a decision.
            self._loop.call_soon(self._load_failed, worker, str(err))
            return
        if launch.cache is not None and launch.cache.folder is not None:
            self.caches.has_disk(worker)
        process.go(launch)

    def drain(self, worker: int) -> None:
        """Ask the worker to drain, in the background."""
        self.unlease(worker)
        self.caches.leaving(worker)
        self._background(worker, self._drain(worker))

    def stop(self, worker: int) -> None:
        """SIGTERM, then SIGKILL."""
        self.unlease(worker)
        self.caches.leaving(worker)
        self.workers[worker].process.stop()

    def kill(self, worker: int) -> None:
        """SIGKILL."""
        if worker in self.workers:
            self.unlease(worker)
            self.caches.leaving(worker)
            self.workers[worker].process.kill()

    def grant(self, ticket: Ticket) -> None:
        """Let the request go on to its worker."""
        if ticket.internal:
            return
        future = self._grant(ticket).granted
        # A client that leaves cancels it at once; that its ticket is over is told a moment later.
        if not future.done():
            future.set_result(self.workers[ticket.worker])

    def reject(self, ticket: Ticket, err: ApiError) -> None:
        """Refuse a queued request."""
        if ticket.internal:
            return
        future = self._grant(ticket).granted
        if not future.done():
            future.set_exception(err)
            future.exception()  # its client may have left already: nobody needs to look

    def revoke(self, ticket: Ticket, err: ApiError) -> None:
        """End a granted request with an error."""
        grant = self._grant(ticket)
        if grant.revoked is None:
            grant.revoked = err
            if grant.on_revoke is not None:
                grant.on_revoke()

    def lease(self, worker: int) -> None:
        """Ask for the worker's lease, and hold it, in the background."""
        known = self.workers[worker]
        known.lease = self._task(worker, self._hold(known))

    def unlease(self, worker: int) -> None:
        """Close the connection that is the worker's lease."""
        known = self.workers.get(worker)
        if known is not None and known.lease is not None:
            known.lease.cancel()
            known.lease = None

    def lend(self, lease: Lease) -> None:
        """Whoever waits for it may begin."""
        future = self.lent(lease)
        if not future.done():
            future.set_result(None)

    def deny(self, lease: Lease, err: ApiError) -> None:
        """Whoever waits for it hears why not."""
        future = self.lent(lease)
        if not future.done():
            future.set_exception(err)
            future.exception()  # it may have stopped waiting: nobody needs to look

    def lent(self, lease: Lease) -> asyncio.Future[None]:
        """What settles once the lease is lent or denied; until `lent_over`."""
        return self._lent.setdefault(lease.number, self._loop.create_future())

    def lent_over(self, lease: Lease) -> None:
        """Nobody waits for it or holds it any more."""
        self._lent.pop(lease.number, None)

    def log(self, event: str, model: str, detail: str = "") -> None:
        """Keep it for the page, and write it to the parent's log."""
        if not model:
            logger.debug("%s spare: %s", event, detail)
            return
        happened = PoolEvent(time.time(), event, model, detail)
        self.recent.append(happened)
        self._listeners.event(happened)
        level = logging.WARNING if event == "loss" else logging.INFO
        logger.log(level, "%s %s%s", event, model, f": {detail}" if detail else "")

    def _log_of(self, model: str) -> RotatingLog:
        known = self._logs.get(model)
        if known is None:
            path = log_path(self._log_folder, model or SPARE_LOG)
            known = self._logs[model] = RotatingLog(path, listener=partial(self._heard_line, model))
        return known

    def _heard_line(self, model: str, data: bytes) -> None:
        """On the thread that reads a worker's output."""
        line = data.decode("utf-8", "replace").rstrip("\n")
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._listeners.log_line, model, line)

    def _grant(self, ticket: Ticket) -> Grant:
        found = self.grants.get(ticket.number)
        if found is None:
            found = self.grants[ticket.number] = Grant(ticket, self._loop.create_future())
        return found

    def unreachable(self, worker: int, reason: str) -> None:
        """A granted request could not even connect: whatever the process does, it serves nobody."""
        self.scheduler.on_unreachable(worker, reason)
        self._changed()

    # ---- reports ----------------------------------------------------------------------------------------

    def status(self, worker: int, message: Status) -> None:
        """A line of the status pipe becomes a scheduler event."""
        known = self.workers.get(worker)
        if known is None:
            return
        if isinstance(message, Heartbeat):
            _measure(known, message.tokens, self.now())
            if message.cache is not None:
                self.caches.heard(worker, known.spec.name, message.cache)
            if message.experts is not None:
                self.experts.heard(worker, known.spec.name, message.experts)
            self.scheduler.on_heartbeat(worker, message.progress, message.pending)
        elif isinstance(message, Imported):
            self.scheduler.on_imported(worker)
        elif isinstance(message, Loading):
            self.scheduler.on_loading(worker, message.done_bytes, message.total_bytes)
        elif isinstance(message, Failed):
            known.reason = message.reason
            self._background(worker, self._report_failure(known))
        elif self.scheduler.on_says_ready(worker):
            self._background(worker, self._probe(known))
        self._changed()

    def nonsense(self, worker: int, what: str) -> None:
        """Noted in the model's log and believed in nothing."""
        if (known := self.workers.get(worker)) is not None:
            known.log.write(f"--- worker {worker} sent {what}\n".encode())

    def exited(self, worker: int, reason: str) -> None:
        """The process is gone."""
        known = self.workers.pop(worker, None)
        if known is None:
            return
        known.log.write(f"--- worker {worker} ended: {reason}\n".encode())
        slot = self.scheduler.slots.get(known.spec.name, self.scheduler.spare)
        loading = slot.worker == worker and slot.phase in ("starting", "loading")
        for task in known.tasks:
            task.cancel()
        known.upstream.close()
        self.experts.ended(worker)
        lost = self.caches.gone(worker)
        if lost is not None:
            self.log("loss", known.spec.name, lost)
        self.scheduler.on_exit(worker, self._with_tail(known, known.reason or reason) if loading else reason)
        self._changed()

    def _with_tail(self, known: Worker, reason: str) -> str:
        tail = last_words(known.process.tail(), reason)
        return reason if not tail else f"{reason} (its last lines: {' | '.join(tail)})"

    async def _report_failure(self, known: Worker) -> None:
        """Wait for the end of a worker that said why it fails; `exited` tells with its last lines."""
        await asyncio.sleep(FAILED_EXIT_WAIT_S)
        self._load_failed(known.number, self._with_tail(known, known.reason or "no reason given"))

    def _load_failed(self, worker: int, reason: str) -> None:
        self.scheduler.on_failed(worker, reason)
        self._changed()

    async def _probe(self, known: Worker) -> None:
        """Ready means that the socket answers."""
        try:
            async with asyncio.timeout(READY_PROBE_TIMEOUT_S):
                async with await known.upstream.request("GET", "/health") as answer:
                    await answer.read()
                    problem = None if answer.status == 200 else f"its /health answers {answer.status}"
        except Exception as err:  # whatever it is, a load must not wait for ever
            if not isinstance(err, UpstreamError | TimeoutError):
                logger.exception("asking worker %d whether it is ready", known.number)
            problem = f"its socket does not answer ({type(err).__name__})"
        if problem is None:
            self.caches.ready(known.number)
            self.scheduler.on_ready(known.number)
        else:
            self.scheduler.on_failed(known.number, f"the worker says it is ready, but {problem}")
        self._changed()

    async def _hold(self, known: Worker) -> None:
        """The worker's lease, for as long as this runs."""

        def leased() -> None:
            self.scheduler.on_leased(known.number)
            self._changed()

        broke = await native_lease.hold(known.upstream, leased)
        # One that dies closes its sockets first; `exited` tells better why, and ends this.
        await asyncio.sleep(FAILED_EXIT_WAIT_S)
        self.scheduler.on_unleased(known.number, broke)
        self._changed()

    async def _drain(self, worker: int) -> None:
        """Drain over the socket; whatever happens, `on_drained` follows."""
        ended = await self.caches.drain(worker, self.drain_timeout_s)
        if not ended.durable and (known := self.workers.get(worker)) is not None:
            self.log("loss", known.spec.name, ended.text)
        self.scheduler.on_drained(worker, ended.text if ended.durable else "")
        self._changed()

    def _upstream(self, worker: int) -> Upstream | None:
        known = self.workers.get(worker)
        return known.upstream if known is not None else None

    def _background(self, worker: int, work: Coroutine[None, None, None]) -> None:
        self._task(worker, work)

    def _task(self, worker: int, work: Coroutine[None, None, None]) -> asyncio.Task[None] | None:
        if worker not in self.workers:
            work.close()
            return None
        task = self._loop.create_task(work)
        tasks = self.workers[worker].tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task
