"""The answers of a scripted worker: requests whole and streamed, health, stats, control, and their faults.

A chat whose text the script gives is a `Row` (scripted_row.py); everything else goes through the product's
readers and writers (scripted_wire.py).

`Engine` plays engine and HTTP surface in one: its counters are what heartbeats and `/stats` report. It
works in one event loop and nothing else mutates it. A row is *owed* from its admission to its last token,
except while its client reads more slowly than it writes; a row of a hung engine stays owed even when its
client has left, because a hung engine acts on no mark.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

import msgspec

from mlxpool.shared import errors
from mlxpool.shared.control import (
    HEADER_REQUEST_ID,
    CacheShare,
    DrainReport,
    KvStats,
    Launch,
    Lease,
    WorkerStats,
)
from tests.tools.scripted_cache import ScriptedCache
from tests.tools.scripted_http import Exchange, Request
from tests.tools.scripted_row import Row
from tests.tools.scripted_script import Script

if TYPE_CHECKING:
    from tests.tools.scripted_wire import WireRow

CHAT = "/v1/chat/completions"
PATHS = frozenset({CHAT, "/v1/completions", "/v1/messages", "/v1/responses"})

# Prefill shows progress this often, as chunks of a real one do.
PREFILL_SLICE_S = 0.02


class Process(Protocol):
    """What the engine needs of the process it lives in."""

    @property
    def life(self) -> Log:
        """The log of life events."""
        ...

    def crash(self) -> NoReturn:
        """Dies as the script says."""
        ...


class Log(Protocol):
    """The log of life events."""

    def record(self, event: str, **fields: object) -> None:
        """Writes one event."""
        ...


class Engine:
    """Serves the socket of one scripted worker."""

    def __init__(self, launch: Launch, script: Script, weights_bytes: int, process: Process) -> None:
        self._launch = launch
        self._script = script
        self._weights_bytes = weights_bytes
        self._process = process
        self._rows: set[Row | WireRow] = set()
        self._owed: set[Row | WireRow] = set()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._leases = 0
        self._unleased = asyncio.Event()
        self._unleased.set()
        self._requests = self._prompt_tokens = self._cancelled = self._errors = 0
        self.cache = ScriptedCache(launch.cache, script)
        self.tokens = 0
        self.progress = 0
        self.hung = False

    @property
    def pending(self) -> int:
        """Rows that work is owed to; an engine that hangs in its load owes that."""
        return len(self._owed) or int(self.hung)

    async def answer(self, request: Request, out: Exchange) -> None:
        """One request of whatever path."""
        match request.method, request.path:
            case "GET", "/health":
                healthy = not (self._script.health_fails or self._draining)
                out.whole(200 if healthy else 503, b'{"status":"ok"}' if healthy else b'{"status":"failing"}')
            case "GET", "/stats":
                out.whole(200, msgspec.json.encode(self._stats()))
            case "POST", "/control/drain":
                await self._drain(request, out)
            case "POST", "/control/flush":
                await self._flush(out)
            case "POST", "/control/cache":
                await self._share(request, out)
            case "POST", "/control/lease":
                await self._lease(out)
            case "POST", path if path in PATHS:
                await self._infer(request, out)
            case method, path:
                self._refuse(
                    request, out, errors.error("not_found", f"{method} {path}: no such path on a worker")
                )

    # Inside

    def _stats(self) -> WorkerStats:
        return WorkerStats(
            model=self._launch.model,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            tokens=self.tokens,
            cancelled=self._cancelled,
            errors=self._errors,
            rows=len(self._rows),
            waiting=0,
            progress=self.progress,
            prefill_chunk=self._launch.prefill_chunk or 0,
            context=self._launch.context,
            batch=self._launch.batch,
            kv_pool_bytes=self._launch.kv_pool_bytes,
            kv_used_bytes=0,
            active_bytes=0,
            peak_bytes=0,
            cache_bytes=0,
            weights_bytes=self._weights_bytes,
            backend="scripted",
            dtype="none",
            tokens_per_s=self._script.tokens_per_s,
            prompt_cache=self.cache.prompt_stats,
            ssd_cache=self.cache.ssd_stats,
            kv=KvStats("none", {"KVCache": 1}),
        )

    def _refuse(self, request: Request, out: Exchange, err: errors.ApiError) -> None:
        self._errors += 1
        request_id = request.headers.get(HEADER_REQUEST_ID.lower(), "")
        body = errors.encode(err, errors.protocol_of(request.path), request_id or None)
        out.whole(err.status, body, {HEADER_REQUEST_ID: request_id, **err.headers()})

    async def _drain(self, request: Request, out: Exchange) -> None:
        self._draining = True
        self._process.life.record("drain", rows=len(self._rows))
        start = time.monotonic()
        # What memory holds is the engine's to hand out.
        if self._script.never_drain or self.hung:
            await asyncio.get_running_loop().create_future()
        try:
            timeout_s = float(request.query.get("timeout_s", "120"))
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            pass
        except ValueError:
            bad = f"timeout_s: {request.query['timeout_s']!r} is not a number of seconds"
            self._refuse(request, out, errors.error("invalid_request", bad, param="timeout_s"))
            return
        await asyncio.sleep(self._script.drain_s)
        self._report(out, msgspec.structs.replace(self.cache.flush(), pending=len(self._rows)), start)
        self._process.life.record("drained", rows=len(self._rows))

    async def _flush(self, out: Exchange) -> None:
        start = time.monotonic()
        self._process.life.record("flush")
        if self._script.never_flush:
            await asyncio.get_running_loop().create_future()
        self._report(out, self.cache.flush(), start)

    def _report(self, out: Exchange, report: DrainReport, start: float) -> None:
        elapsed_ms = (time.monotonic() - start) * 1000
        out.whole(200, msgspec.json.encode(msgspec.structs.replace(report, elapsed_ms=elapsed_ms)))

    async def _share(self, request: Request, out: Exchange) -> None:
        share = msgspec.json.decode(request.body, type=CacheShare)
        self._process.life.record("share", ram_bytes=share.ram_bytes)
        if self._script.never_share:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self._script.share_s)
        self.cache.share_bytes = share.ram_bytes
        self._process.life.record("shared", ram_bytes=share.ram_bytes)
        out.whole(200, b"{}")

    async def _lease(self, out: Exchange) -> None:
        """Held until the connection ends, which cancels this."""
        self._leases += 1
        self._unleased.clear()
        self._process.life.record("lease", rows=len(self._rows))
        try:
            if not (self._script.never_lease or self.hung):
                await self._idle.wait()
                # First: whoever hears the answer looks for it.
                self._process.life.record("leased")
                out.start_stream({}, msgspec.json.encode(Lease()) + b"\n")
                if self._script.ends_lease:
                    out.end_stream()
                    return
            await asyncio.get_running_loop().create_future()
        finally:
            self._leases -= 1
            if not self._leases:
                self._unleased.set()
            self._process.life.record("unleased")

    def _row(self, request: Request) -> Row | WireRow:
        """Raises ApiError for a body that is refused."""
        if request.path == CHAT and not self._script.events:
            try:
                return Row(request, self._launch, self._script)
            except msgspec.DecodeError as err:
                raise errors.error("invalid_request", str(err)) from err
        from tests.tools.scripted_wire import WireRow

        return WireRow(request, self._launch, self._script)

    async def _infer(self, request: Request, out: Exchange) -> None:
        request_id = request.headers.get(HEADER_REQUEST_ID.lower(), "")
        if self._draining:
            self._refuse(request, out, errors.error("shutting_down", "this worker drains", retry_after_s=1))
            return
        try:
            row = self._row(request)
        except errors.ApiError as err:
            self._refuse(request, out, err)
            return
        self._requests += 1
        self._prompt_tokens += row.prompt_tokens
        self.cache.ask(row.prompt, row.prompt_tokens)
        await self._unleased.wait()
        self._rows.add(row)
        self._owed.add(row)
        self._idle.clear()
        log = self._process.life.record
        log("request", request_id=request_id, prompt=row.prompt, stream=row.stream)
        try:
            await self._run(request, row, out)
            log("done", request_id=request_id, tokens=row.done)
        except asyncio.CancelledError:
            self._cancelled += 1
            log("cancelled", request_id=request_id, tokens=row.done)
            raise
        finally:
            self._rows.discard(row)
            if not self.hung:
                self._owed.discard(row)
            if not self._rows:
                self._idle.set()

    async def _run(self, request: Request, row: Row | WireRow, out: Exchange) -> None:
        script = self._script
        if script.slow_headers_s:
            await self._busy(row, out, script.slow_headers_s)
        if script.status and row.faulty:
            codes = [code for code, status in errors.STATUS_OF.items() if status == script.status]
            code = codes[0] if codes else "internal_error"
            scripted = errors.ApiError(script.status, code, f"scripted answer {script.status}")
            self._refuse(request, out, scripted)
            return
        headers = {HEADER_REQUEST_ID: row.request_id}
        if row.stream:
            out.start_stream(headers, row.role_event())
        await self._at("prefill", row)
        await self._busy(row, out, script.prefill_s)
        if row.stream:
            _send(out, row.prefilled_events())
        await self._decode(row, out)
        if row.stream:
            if not (script.no_end and row.faulty):
                _send(out, row.last_events())
            out.end_stream()
            return
        try:
            out.whole(200, row.body(), headers)
        except errors.ApiError as err:
            self._refuse(request, out, err)

    async def _at(self, moment: Literal["prefill", "decode"], row: Row | WireRow) -> None:
        """The script's fault of this moment; and a hung engine holds every row, whoever hung it."""
        if row.faulty and self._script.crash_at == moment:
            self._process.crash()
        if row.faulty and self._script.hang_at == moment:
            self.hung = True
        if self.hung:
            await asyncio.get_running_loop().create_future()

    async def _busy(self, row: Row | WireRow, out: Exchange, seconds: float) -> None:
        """Work that shows progress but yields no token: prefill, or an answer slow to begin."""
        self.progress += 1
        end = time.monotonic() + seconds
        said = time.monotonic()
        while (now := time.monotonic()) < end:
            if row.stream and out.head_sent and now - said >= self._script.keepalive_s:
                out.send(row.silent_event())
                said = now
            await asyncio.sleep(min(PREFILL_SLICE_S, end - now))
            if self.hung:
                await asyncio.get_running_loop().create_future()
            self.progress += 1

    async def _decode(self, row: Row | WireRow, out: Exchange) -> None:
        script = self._script
        period_s = 1 / script.tokens_per_s if script.tokens_per_s else 0.0
        start = time.monotonic()
        fault_after = script.fault_after_tokens if row.faulty else -1
        while row.done < row.count:
            first, last = row.done, min(row.done + script.events_per_write, row.count)
            if first < fault_after < last:
                last = fault_after
            if period_s:
                await asyncio.sleep(start + last * period_s - time.monotonic())
            if self.hung or first == fault_after:
                await self._at("decode", row)
            if row.stream:
                if first == fault_after and script.half_event_then_crash:
                    event = row.token_event(first)
                    _send(out, event[: len(event) // 2])
                    await out.flushed()
                    self._process.crash()
                _send(out, b"".join([row.token_event(i) for i in range(first, last)]))
            row.done = last
            self.tokens += last - first
            self.progress += 1
            if out.blocked:
                self._owed.discard(row)
                await out.writable()
                self._owed.add(row)
            elif not period_s:
                # Every write gives way to other rows and to a client that leaves.
                await asyncio.sleep(0)


def _send(out: Exchange, data: bytes) -> None:
    """A piece of a stream; nothing is none: an empty chunk would end it."""
    if data:
        out.send(data)
