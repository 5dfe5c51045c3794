"""The pool as the rest of the parent sees it: ask for a model, get a worker; look; load, unload, pin.

Holds the scheduler, its effects and the one timer that wakes it. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from mlxpool.parent.library import Description, Library, LibraryModel
from mlxpool.parent.prompt_disk import PromptDisk
from mlxpool.shared.backend import Backend
from mlxpool.shared.colibri.stats import HeatMap
from mlxpool.shared.config import Settings
from mlxpool.shared.control import Launch, WorkerStats
from mlxpool.shared.errors import ApiError
from mlxpool.shared.footprint import footprint_bytes
from mlxpool.shared.memory import OVERHEAD_BYTES
from mlxpool.shared.trace import FILE_NAME

from .contract import Limits
from .effects import CannotLaunch, Grant, Listeners, PoolEffects
from .prompt_caches import FlushReport
from .scheduler import Scheduler
from .specs import make_cache_launch, make_launch, make_spec, serves_differently
from .state import ModelSpec, Slot
from .upstream import Upstream
from .views import CachePanel, PoolView, WorkerView, leases_view, queue_view, reason_of
from .worker_log import last_lines, log_path

logger = logging.getLogger("mlxpool.pool")

# How long a model's files are believed unchanged: a request a millisecond later need not stat them again.
SPEC_TTL_S = 1.0
# Memory moves with prompts and batches, over seconds; reading it walks the process's page tables.
FOOTPRINT_INTERVAL_S = 5.0
# A worker's event loop answers at once; one that doesn't is stopped or dying.
STATS_TIMEOUT_S = 5.0


class PoolService:
    """Create inside the running loop; `close` before it ends."""

    def __init__(
        self,
        settings: Settings,
        library: Library,
        backend: Backend,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        run_folder: Path,
    ) -> None:
        self.library = library
        self.backend = backend
        self.settings = settings
        self._loop = asyncio.get_running_loop()
        # By name, with the time until which it is believed. Never dropped: a model that waits for memory is
        # launched by what is here, also when the library has lost it in the meantime.
        self._specs: dict[str, tuple[float, ModelSpec, LibraryModel, Description]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: float | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._empty = asyncio.Event()
        self._leaving: set[str] = set()  # unloads that a reload asked for
        self.listeners = Listeners()
        self.changed: Callable[[], None] = lambda: None  # after every event, for those who show the pool
        self.disk = PromptDisk(settings.kv_folder, settings.cache, self._after)
        self._epoch = time.time() - time.monotonic()  # monotonic → unix seconds, for people
        self.budget = library.budget()
        self.effects = PoolEffects(
            argv=argv,
            env=env,
            run_folder=run_folder,
            log_folder=settings.home / "logs",
            drain_timeout_s=settings.pool.drain_timeout,
            cache_bytes=self.budget.prompt_cache_bytes,
            launch=self._launch,
            changed=self._after,
            listeners=self.listeners,
        )
        self.effects.caches.disk_changed = self.disk.look_soon
        self.scheduler = self.effects.scheduler = Scheduler(self._limits(), self.effects)

    # ---- requests ---------------------------------------------------------------------------------------

    def request(self, model: LibraryModel, keep_alive_s: float | None = None) -> Grant:
        """A place for one request. Raises ApiError where it is refused at once. End it with `done`."""
        ticket = self.scheduler.on_request(self.spec(model), keep_alive_s=keep_alive_s)
        grant = self.effects.grants.get(ticket.number)
        if grant is None:
            grant = self.effects.grants[ticket.number] = Grant(ticket, self._loop.create_future())
        self._after()
        return grant

    def done(self, grant: Grant) -> None:
        """The request is over, however it ended."""
        grant.on_revoke = None
        self.effects.grants.pop(grant.ticket.number, None)
        grant.granted.cancel()
        self.scheduler.on_done(grant.ticket)
        self._after()

    def first_token(self, grant: Grant) -> None:
        """The client has its first bytes of the answer."""
        self.scheduler.on_first_token(grant.ticket)

    def unreachable(self, grant: Grant, reason: str) -> None:
        """The granted worker takes no connection."""
        self.effects.unreachable(grant.ticket.worker, reason)

    def spec(self, model: LibraryModel) -> ModelSpec:
        """What the model would take now, from its files; remembered for a moment."""
        now = time.monotonic()
        known = self._specs.get(model.name)
        if known is not None and now < known[0] and known[2] is model:
            return known[1]
        described = self.library.describe(model, self.backend, self.budget.models_bytes)
        if known is not None and known[3] is described and known[2] is model:
            spec = known[1]
        else:
            spec = make_spec(model, described, self.settings.pool.queue_limit)
        self._specs[model.name] = (now + SPEC_TTL_S, spec, model, described)
        return spec

    def _launch(self, name: str, socket: str, cache_bytes: int) -> Launch:
        _, _, model, described = self._specs[name]
        if described.plan is None:
            raise CannotLaunch(described.fault or "its folder says nothing of it any more")
        trace = self.settings.home / "logs" / FILE_NAME if self.settings.server.trace else None
        cache = make_cache_launch(self.settings, cache_bytes)
        trace_path = str(trace) if trace is not None else None
        return make_launch(model, described, socket, trace_path, cache, self.library.adapters)

    @asynccontextmanager
    async def exclusive(self, holder: str, memory_bytes: int) -> AsyncIterator[None]:
        """The GPU alone, once all who came before are served, with so much memory; see jobs/gpu.py."""
        lease = self.scheduler.on_exclusive(holder, memory_bytes)
        try:
            self._after()
            await self.effects.lent(lease)
            yield
        finally:
            self.effects.lent_over(lease)
            self.scheduler.on_release(lease)
            self._after()

    # ---- commands ---------------------------------------------------------------------------------------

    def load(self, model: LibraryModel) -> None:
        """Start loading. Raises ApiError."""
        self.scheduler.on_load(self.spec(model))
        self._after()

    def unload(self, model: LibraryModel, *, force: bool) -> None:
        """Unload after what is under way, or at once."""
        self.scheduler.on_unload(model.name, force=force)
        self._after()

    def pin(self, model: LibraryModel, pinned: bool) -> None:
        """Pin or unpin."""
        self.scheduler.on_pin(self.spec(model), pinned)
        self._after()

    def use(self, settings: Settings) -> None:
        """Follow other settings. A live worker that they would serve differently leaves after its tickets."""
        old, self.settings = self.settings, settings
        self.effects.drain_timeout_s = settings.pool.drain_timeout
        self.disk.use(settings.cache)
        self.budget = self.library.budget()
        self.effects.caches.resize(self.budget.prompt_cache_bytes)
        slots = self.scheduler.slots
        told = {name: slot.reserved for name, slot in slots.items() if slot.told_go}
        here = [model for model in map(self.library.find, slots) if model is not None]
        specs = {model.name: self.spec(model) for model in here}
        self.scheduler.on_limits(self._limits(), specs.values())
        keeps_differently = make_cache_launch(old, 0) != make_cache_launch(settings, 0)
        for name in list(slots):
            model = self.library.find(name)
            if model is None:
                self.scheduler.on_unload(name)
                continue
            was = old.model(name)
            if model.settings.pin != was.pin:
                self.pin(model, model.settings.pin)
            # One that was told only just now was told what the settings say.
            if name in told and (
                keeps_differently or serves_differently(was, model.settings, told[name], specs[name])
            ):
                self.scheduler.on_unload(name)
                self._leaving.add(name)
            elif name in self._leaving:  # an earlier reload's wish that this one takes back
                self._leaving.discard(name)
                self.scheduler.on_keep(name)
        for model in self.library.models():
            if model.settings.pin and not old.model(model.name).pin:
                self.pin(model, True)
                self._load_at_start(model)
        self._after()

    def _limits(self) -> Limits:
        pool = self.settings.pool
        return Limits(
            budget_bytes=self.budget.models_bytes,
            spare_bytes=OVERHEAD_BYTES[self.backend] if pool.spare_worker else 0,
            queue_timeout_s=pool.queue_timeout,
            load_timeout_s=pool.load_timeout,
            stall_timeout_s=pool.stall_timeout,
        )

    # ---- looking ----------------------------------------------------------------------------------------

    def slot(self, name: str) -> Slot | None:
        """What is known of a model that has been spoken of."""
        return self.scheduler.slots.get(name)

    def shown(self, name: str) -> LibraryModel | None:
        """The model of that name among those of the view, also one that the library has lost since."""
        slot, known = self.slot(name), self._specs.get(name)
        return known[2] if slot is not None and slot.is_shown and known is not None else None

    def reason(self, slot: Slot) -> str | None:
        """Why a model is in its state, for a person."""
        return reason_of(slot, self.scheduler.leases.front)

    def view(self) -> PoolView:
        """The body of /api/pool."""
        now, every, front = self.effects.now(), self.scheduler.slots, self.scheduler.leases.front
        slots = [slot for slot in every.values() if slot.is_shown]
        waiting = sorted((t for s in every.values() for t in s.waiting), key=lambda t: t.number)
        return PoolView(
            budget_bytes=self.budget.total_bytes,
            prompt_cache_bytes=self.budget.prompt_cache_bytes,
            reserved_bytes=sum(s.reserved for s in every.values()) + self.scheduler.leases.reserved,
            workers=[self._worker_view(slot) for slot in slots],
            queue=[queue_view(every[t.model], t, front, round(now - t.arrived, 3)) for t in waiting],
            leases=leases_view(self.scheduler.leases),
            counters=msgspec.to_builtins(self.scheduler.counters),
            cache=self._cache_panel(),
            recent=list(self.effects.recent)[-20:],
        )

    def _worker_view(self, slot: Slot) -> WorkerView:
        worker = self.effects.workers.get(slot.worker)
        return WorkerView(
            model=slot.name,
            state=slot.phase,
            pid=worker.process.pid if worker is not None else None,
            since=round(slot.since + self._epoch, 3),
            planned_bytes=slot.spec.planned_bytes,
            footprint_bytes=slot.footprint,
            active=len(slot.running),
            queued=len(slot.waiting),
            restarts=slot.restarts,
            pinned=slot.pinned,
            last_used=round(slot.last_used + self._epoch, 3) if slot.last_used else None,
            reason=self.reason(slot),
            loaded_bytes=slot.loaded_bytes,
            total_bytes=slot.total_bytes,
            tokens_per_s=worker.tokens_per_s if worker is not None else 0.0,
            unloading=slot.unload_before is not None,
            cache=self.effects.caches.tally.of(slot.worker),
        )

    def _cache_panel(self) -> CachePanel:
        tally, cache = self.effects.caches.tally, self.settings.cache
        told = tally.all()
        return CachePanel(
            bytes=told.bytes,
            max_bytes=self.budget.prompt_cache_bytes,
            ssd=cache.is_on_disk,
            ssd_bytes=self.disk.bytes,
            ssd_max_bytes=cache.ssd_budget,
            hits=told.hits,
            misses=told.misses,
            cached_tokens=told.cached_tokens,
            pending=told.pending,
            restores=told.restores,
            restore_ms_last=told.restore_ms_last,
            drains=sum(tally.drains.values()),
            losses=tally.drains[False],
            off=told.off,
        )

    def workers(self) -> dict[str, int]:
        """Model → worker number of those that can be asked something."""
        slots = self.scheduler.slots.values()
        return {
            slot.name: slot.worker for slot in slots if slot.phase in ("ready", "draining") and slot.alive
        }

    async def flush(self, timeout_s: float) -> FlushReport:
        """Have all workers write the prompts that are not on disk yet; see `POST /api/cache/flush`."""
        return await self.effects.caches.flush(self.workers(), timeout_s)

    async def worker_stats(self, name: str) -> WorkerStats | None:
        """What the model's worker says of itself; None where none serves. Raises UpstreamError."""
        upstream = self.upstream(name)
        if upstream is None:
            return None
        async with asyncio.timeout(STATS_TIMEOUT_S), await upstream.request("GET", "/stats") as answer:
            return msgspec.json.decode(await answer.read(), type=WorkerStats)

    async def heat_map(self, name: str) -> HeatMap | None:
        """Which experts the model is asked for; None where it streams none, or where no worker serves it.
        Raises UpstreamError."""
        upstream = self.upstream(name)
        if upstream is None:
            return None
        async with asyncio.timeout(STATS_TIMEOUT_S), await upstream.request("GET", "/experts") as answer:
            body = await answer.read()
            return None if answer.status == 404 else msgspec.json.decode(body, type=HeatMap)

    def upstream(self, name: str) -> Upstream | None:
        """The way to the model's worker, for questions that take no ticket; None where none serves."""
        slot = self.scheduler.slots.get(name)
        worker = self.effects.workers.get(slot.worker) if slot is not None else None
        if worker is None or slot is None or slot.phase not in ("ready", "draining"):
            return None
        return worker.upstream

    def last_log_lines(self, name: str, count: int) -> list[str]:
        """The end of a model's log. Reads a file: not for the event loop's thread."""
        return last_lines(log_path(self.settings.home / "logs", name), count)

    # ---- life -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Pin what the settings pin, load those and the start-up model, begin to watch memory and disk."""
        self._watching = [
            self._loop.create_task(self._watch_footprints()),
            self._loop.create_task(self.disk.watch()),
        ]
        self.scheduler.on_tick()
        for model in self.library.models():
            if model.settings.pin:
                self.pin(model, True)
                self._load_at_start(model)
        if self.settings.startup_model is not None:
            self._load_at_start(self.library.resolve(self.settings.startup_model))

    def _load_at_start(self, model: LibraryModel) -> None:
        """A model that can't be loaded is no reason not to serve the others."""
        try:
            self.load(model)
        except ApiError as err:
            logger.error("%s", err.message)

    async def close(self) -> None:
        """Drain all workers in parallel and wait until no process is left."""
        for task in self._watching:
            task.cancel()
        self.scheduler.on_shutdown()
        self._after()
        await self._empty.wait()
        if self._timer is not None:
            self._timer.cancel()

    def close_now(self) -> None:
        """Cut everything; `close` returns soon after."""
        self.scheduler.on_shutdown_now()
        self._after()

    def _after(self) -> None:
        """After any event: set the timer to the next deadline."""
        self.changed()
        if self.scheduler.closed and self.scheduler.empty:
            self._empty.set()
        deadline = self.scheduler.next_deadline()
        if deadline == self._deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._deadline = deadline
        if deadline is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = self._deadline = None
        self.scheduler.on_tick()
        self._after()

    def _prompt_bytes(self, worker: int) -> int:
        """What of a worker's footprint is its prompt cache: no plan holds it. On CUDA it is no part of it."""
        told = self.effects.caches.tally.of(worker)
        return told.bytes if told is not None and self.backend != "cuda" else 0

    async def _watch_footprints(self) -> None:
        while True:
            await asyncio.sleep(FOOTPRINT_INTERVAL_S)
            for number, worker in list(self.effects.workers.items()):
                size = await self._loop.run_in_executor(None, footprint_bytes, worker.process.pid)
                if size:
                    self.scheduler.on_footprint(number, max(1, size - self._prompt_bytes(number)))
            self._after()
