"""The prompt caches of all workers as one: their shares of memory, their drains, flushes and counts.

Decides nothing: cache_shares.py says who is told what, cache_tally.py counts. This tells and hears it, over
the workers' sockets, in the background: no load, no eviction and no request waits for a share to be taken
up. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import NamedTuple

import msgspec

from mlxpool.shared.control import CacheShare, CacheSummary, DrainReport
from mlxpool.shared.units import format_count, format_duration

from .cache_shares import CacheShares, Move
from .cache_tally import CacheTally
from .upstream import Unreachable, Upstream, UpstreamError

logger = logging.getLogger("mlxpool.pool")

# A share is given up by writing to disk what has no room any more: gigabytes, at a disk's pace.
SHARE_TIMEOUT_S = 60.0
# Most shares are taken up at once. What is free without one that needs longer is handed out meanwhile.
SHARE_PATIENCE_S = 2.0
# What did not reach a worker is told again, after twice as long each time.
RETRY_FIRST_S, RETRY_MAX_S = 1.0, 30.0
# The worker's own time-out ends a drain or a flush; this much later it is taken for hung.
REPORT_MARGIN_S = 5.0

# What asking a worker may fail with; anything else is a fault of ours.
NO_ANSWER = (UpstreamError, TimeoutError, msgspec.MsgspecError)


class FlushReport(msgspec.Struct, frozen=True):
    """The answer of `POST /api/cache/flush`: the workers' reports together, and each by its model's name."""

    durable: bool
    flushed: int
    missing: int
    pending: int
    dropped: int
    failed: int
    elapsed_ms: float
    models: dict[str, DrainReport]


class Drained(NamedTuple):
    """How a drain ended. durable: nothing is lost that was to be on disk. text: for a person."""

    durable: bool
    text: str


class PromptCaches:
    """Which worker may keep how much, and what all of them have done."""

    def __init__(
        self,
        total_bytes: int,
        upstream: Callable[[int], Upstream | None],
        background: Callable[[int, Coroutine[None, None, None]], None],
    ) -> None:
        """upstream: to a worker, None where it is gone. background: runs something while the worker lives."""
        self._shares = CacheShares(total_bytes)
        self._upstream = upstream
        self._background = background
        self._models: dict[int, str] = {}
        self._on_disk: set[int] = set()
        self._draining: dict[int, float] = {}  # since when (monotonic)
        self._retry_s: dict[int, float] = {}  # how long those that something was lost to rest next
        self.total_bytes = total_bytes
        self.tally = CacheTally()
        self.disk_changed: Callable[[], None] = lambda: None  # a worker has written all it had, or is gone

    # ---- shares -------------------------------------------------------------------------------------------

    def resize(self, total_bytes: int) -> None:
        """Another total from now on."""
        self.total_bytes = total_bytes
        self._shares.resize(total_bytes)
        self._tell()

    def launched(self, worker: int, model: str) -> int:
        """The share of a worker that is about to be told its model; the others make room for it."""
        self._models[worker] = model
        share = self._shares.join(worker)
        self._tell()
        return share

    def has_disk(self, worker: int) -> None:
        """The worker was told to keep prompts on disk too: what it can't write is a loss."""
        self._on_disk.add(worker)

    def ready(self, worker: int) -> None:
        """The worker's socket answers."""
        self._shares.reach(worker)
        self._tell()

    def leaving(self, worker: int) -> None:
        """The worker drains or stops."""
        self._shares.settle(worker)

    def gone(self, worker: int) -> str | None:
        """The worker is no more. Returns, for a person, what was lost with it where it died in its drain."""
        lost = self._cut_short(worker)
        self._models.pop(worker, None)
        self._shares.leave(worker)
        self._retry_s.pop(worker, None)
        self._on_disk.discard(worker)
        self.tally.ended(worker)
        self.disk_changed()
        self._tell()
        return lost

    def share_of(self, worker: int) -> int:
        """What it may hold now."""
        return self._shares.of(worker)

    def _tell(self) -> None:
        for move in self._shares.moves():
            self._background(move.worker, self._share(move))

    async def _share(self, move: Move) -> None:
        late = asyncio.get_running_loop().call_later(SHARE_PATIENCE_S, self._late, move.worker)
        body = msgspec.json.encode(CacheShare(move.ram_bytes))
        try:
            await self._ask(move.worker, "/control/cache", SHARE_TIMEOUT_S, body)
        except NO_ANSWER as err:
            model = self._models.get(move.worker)
            logger.warning("model %r does not take its share of the prompt cache: %s", model, _why(err))
            if not isinstance(err, TimeoutError):
                await self._lost(move.worker, unheard=isinstance(err, Unreachable))
                return
        finally:
            late.cancel()
        self._retry_s.pop(move.worker, None)
        self._shares.answered(move.worker)
        self._tell()

    def _late(self, worker: int) -> None:
        self._shares.late(worker)
        self._tell()

    async def _lost(self, worker: int, *, unheard: bool) -> None:
        """A share was told in vain: it is told again, as it is by then, after a rest."""
        self._shares.failed(worker, unheard=unheard)
        self._tell()
        rest_s = self._retry_s.get(worker, RETRY_FIRST_S)
        self._retry_s[worker] = min(2 * rest_s, RETRY_MAX_S)
        await asyncio.sleep(rest_s)
        self._shares.again(worker)
        self._tell()

    # ---- counts -------------------------------------------------------------------------------------------

    def heard(self, worker: int, model: str, summary: CacheSummary) -> None:
        """A heartbeat's word."""
        self.tally.heard(worker, model, summary)

    # ---- drains and flushes -------------------------------------------------------------------------------

    async def drain(self, worker: int, timeout_s: float) -> Drained:
        """Drain a worker, for `timeout_s` at most and a margin. Never raises."""
        begun, on_disk = time.monotonic(), worker in self._on_disk
        self._draining[worker] = begun
        try:
            report = await self._report(worker, "/control/drain", timeout_s)
        except Exception as err:  # whatever it is, the worker must be stopped next
            if not isinstance(err, NO_ANSWER):
                logger.exception("draining model %r", self._models.get(worker))
            self.tally.drained(not on_disk)
            why = f"the drain failed after {time.monotonic() - begun:.1f} s ({_why(err)})"
            return Drained(not on_disk, why + (self._loss(worker) if on_disk else ""))
        finally:
            # Where it died meanwhile, `gone` has told.
            self._draining.pop(worker, None)
        self.tally.drained(report.durable)
        return Drained(report.durable, described(report, on_disk))

    def _cut_short(self, worker: int) -> str | None:
        begun = self._draining.pop(worker, None)
        if begun is None:
            return None
        on_disk = worker in self._on_disk
        self.tally.drained(not on_disk)
        after = f"the worker ended {time.monotonic() - begun:.1f} s into its drain"
        return after + self._loss(worker) if on_disk else None

    def _loss(self, worker: int) -> str:
        told = self.tally.of(worker)
        known = (
            f" ({format_count(told.pending, 'record')} waited to be written)" if told and told.pending else ""
        )
        return f": prompts that were not on disk yet are lost{known}"

    async def flush(self, workers: Mapping[str, int], timeout_s: float) -> FlushReport:
        """Have these workers (model → number) write what is not on disk yet, in parallel. Never raises."""
        begun = time.monotonic()
        reports = await asyncio.gather(
            *(self._flush(model, worker, timeout_s) for model, worker in workers.items())
        )
        self.disk_changed()
        return FlushReport(
            durable=all(report.durable for report in reports),
            flushed=sum(report.flushed for report in reports),
            missing=sum(report.missing for report in reports),
            pending=sum(report.pending for report in reports),
            dropped=sum(report.dropped for report in reports),
            failed=sum(report.failed for report in reports),
            elapsed_ms=round((time.monotonic() - begun) * 1000, 3),
            models=dict(zip(workers, reports, strict=True)),
        )

    async def _flush(self, model: str, worker: int, timeout_s: float) -> DrainReport:
        begun = time.monotonic()
        try:
            return await self._report(worker, "/control/flush", timeout_s)
        except NO_ANSWER as err:
            logger.warning("model %r does not flush its prompt cache: %s", model, _why(err))
            return DrainReport(durable=False, elapsed_ms=round((time.monotonic() - begun) * 1000, 3))

    async def _report(self, worker: int, path: str, timeout_s: float) -> DrainReport:
        body = await self._ask(worker, f"{path}?timeout_s={timeout_s:.3f}", timeout_s + REPORT_MARGIN_S)
        return msgspec.json.decode(body, type=DrainReport)

    async def _ask(self, worker: int, target: str, timeout_s: float, body: bytes = b"") -> bytes:
        """Raises one of NO_ANSWER; also where the answer is a refusal."""
        upstream = self._upstream(worker)
        if upstream is None:
            raise UpstreamError("it is gone")
        try:
            async with (
                asyncio.timeout(timeout_s),
                await upstream.request("POST", target, body=body) as answer,
            ):
                told = await answer.read()
                if answer.status != 200:
                    raise UpstreamError(f"it answers {answer.status}")
                return told
        except TimeoutError:
            raise TimeoutError(f"no answer within {format_duration(timeout_s)}") from None


def described(report: DrainReport, on_disk: bool) -> str:
    """A drain's report in a line. on_disk: whether prompts were to be on disk at all."""
    took = f"in {report.elapsed_ms / 1000:.1f} s"
    if report.durable:
        written = f"({format_count(report.flushed, 'record')} written)"
        saved = f", all prompts are on disk {written}" if on_disk else ""
        cut = f"; cut {format_count(report.pending, 'request')}" if report.pending else ""
        return f"drained {took}{saved}{cut}"
    parts = [f"not all prompts are on disk after the drain ({took})"]
    parts.append(f"missing {format_count(report.missing, 'record')}")
    parts += [f"dropped {format_count(report.dropped, 'record')}"] if report.dropped else []
    parts += [format_count(report.failed, "failed write")] if report.failed else []
    parts += [f"cut {format_count(report.pending, 'request')}"] if report.pending else []
    why = f": {report.off}" if isinstance(report.off, str) else ""
    return ", ".join(parts) + why


def _why(err: Exception) -> str:
    if isinstance(err, TimeoutError):
        return str(err)
    return f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
