"""The worker's HTTP side: one UNIX socket, one event loop, thin handlers.

Every request is prepared off the loop, becomes a row of the engine, and hears from it through a
`Mailbox`. A handler only waits for its mailbox and writes what is in it: all that one engine step had to
say goes out in one write, an SSE event is never split over two, and a reader that is slow delays its own
handler and nobody else. The row belongs to the handler: whatever ends the handler (the answer, an error,
a client that left, which aiohttp turns into a cancellation) also cancels the row.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import msgspec
from aiohttp import web

from mlxpool.shared import control, errors
from mlxpool.shared.chat import ChatTokenizer
from mlxpool.shared.colibri.stats import ColibriStats
from mlxpool.shared.errors import ApiError, error
from mlxpool.worker.adapters.mounted import Adapters
from mlxpool.worker.adapters.routes import add_adapter_routes
from mlxpool.worker.cache import durability
from mlxpool.worker.colibri.routes import add_expert_routes
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.terms import Loaded
from mlxpool.worker.grammar.service import GrammarService
from mlxpool.worker.grammar.thinking_budget import within_budget
from mlxpool.worker.lease import idle_or_resting, lease
from mlxpool.worker.load import backend
from mlxpool.worker.mailbox import Mailbox
from mlxpool.worker.request.prepare import NoRoom, Prepared, Preparer
from mlxpool.worker.request_log import RequestLog, open_trace
from mlxpool.worker.text.events import Failure, Finish
from mlxpool.worker.text.model import ModelText
from mlxpool.worker.token_bytes import TokenBytes
from mlxpool.worker.wire.endpoints import ENDPOINTS, Endpoint
from mlxpool.worker.wire.writer import Identity, Said, Writer

BODY_LIMIT_BYTES = 64 * 1024 * 1024

# Clients and proxies give up on a silent stream after 15 s and more.
KEEP_ALIVE_S = 10.0

# More events than these are put together off the loop: a token with 20 log-probabilities takes 24 us.
LOOP_EVENTS = 256

# As some proxies log it; no client ever sees it.
CLIENT_LEFT_STATUS = 499

# Clients' header lines are limited to 8 KB and more.
WARNING_CHARS = 1000

# A drain without a time-out of its own: the pool's default drain_timeout.
DRAIN_TIMEOUT_S = 120.0

# What a drain waits for the engine to write what it learned of a model's experts: a small file.
LEARNED_S = 2.0

# Of a drain's time, what is kept for writing: the most that memory holds takes a few seconds.
WRITING_S, WRITING_SHARE = 20.0, 0.25

# The id the parent gave, or one of our own: of the request that this task handles.
_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Serves one loaded model. `start` listens, `close` stops listening; counters are its own."""

    def __init__(
        self,
        launch: control.Launch,
        engine: Engine,
        loaded: Loaded,
        text: ModelText,
        tokenizer: ChatTokenizer,
        preparer: Preparer,
        grammars: GrammarService,
        adapters: Adapters,
    ) -> None:
        self._launch = launch
        self._engine = engine
        self._loaded = loaded
        self._text = text
        self._token_bytes = TokenBytes(tokenizer)
        self._preparer = preparer
        self._grammars = grammars
        self._adapters = adapters
        self._requests = 0
        self._refused = 0
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._trace = open_trace(launch.trace_path)
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen on the launch's socket, which only this user may open. Raises OSError."""
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[_answer_errors])
        app.router.add_get("/health", self._health)
        app.router.add_get("/stats", self._stats)
        for endpoint in ENDPOINTS:
            app.router.add_post(endpoint.path, partial(self._answer, endpoint))
        app.router.add_post("/control/drain", self._drain)
        app.router.add_post("/control/flush", self._flush)
        app.router.add_post("/control/cache", self._share)
        add_adapter_routes(app, self._adapters)
        add_expert_routes(app, self._launch.model, self._loaded.stream)
        app.router.add_post("/control/lease", partial(lease, self._engine.hold))
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.SockSite(self._runner, _private_socket(self._launch.socket)).start()

    async def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._launch.socket)
        self._preparer.close()
        if self._engine.cache is not None:
            await asyncio.to_thread(self._engine.cache.close)
        await self._grammars.close()

    async def _health(self, _request: web.Request) -> web.Response:
        if self._draining:
            raise _draining_error()
        return _json({"status": "ok"})

    async def _stats(self, _request: web.Request) -> web.Response:
        counters, launch, cache = self._engine.counters, self._launch, self._engine.cache
        return _json(
            control.WorkerStats(
                model=launch.model,
                requests=self._requests,
                prompt_tokens=counters.prompt_tokens,
                tokens=counters.tokens,
                cancelled=counters.cancelled,
                errors=counters.errors + self._refused,
                rows=counters.rows,
                waiting=max(0, self._engine.pending - counters.rows),
                progress=self._engine.progress,
                prefill_chunk=self._engine.width.tokens,
                context=launch.context,
                batch=launch.batch,
                kv_pool_bytes=launch.kv_pool_bytes,
                kv_used_bytes=counters.kv_used_bytes,
                active_bytes=counters.active_bytes,
                peak_bytes=counters.peak_bytes,
                cache_bytes=counters.cache_bytes,
                weights_bytes=self._loaded.weights_bytes,
                backend=backend(),
                dtype=self._loaded.dtype,
                tokens_per_s=counters.tokens / counters.decode_s if counters.decode_s else 0.0,
                open_grammars=self._grammars.open_constraints,
                prompt_cache=control.PromptCacheStats() if cache is None else cache.stats(),
                ssd_cache=None if cache is None else cache.ssd_stats(),
                kv=control.KvStats(self._loaded.dtype, self._loaded.cache_classes),
                colibri=self._streamed_stats(),
            )
        )

    def _streamed_stats(self) -> ColibriStats | None:
        streamed, launch = self._engine.streamed, self._launch
        if streamed is None:
            return None
        cached_bytes = launch.cache.ram_bytes if launch.cache is not None else 0
        return msgspec.structs.replace(
            streamed.stats(),
            resident_bytes=self._loaded.weights_bytes,
            chunk=self._engine.width.tokens,
            context=launch.context,
            planned_bytes=launch.stream.planned_bytes if launch.stream is not None else 0,
            limit_bytes=launch.memory_limit_bytes + cached_bytes,
        )

    async def _drain(self, request: web.Request) -> web.Response:
        """Admit nothing more, wait for what runs, bring to disk what memory holds."""
        began_s = time.perf_counter()
        timeout_s = _timeout_s(request)
        self._draining = True
        # Answers that would take all of it leave something to write what is there.
        answers_s = timeout_s - min(WRITING_S, timeout_s * WRITING_SHARE)
        await idle_or_resting(self._idle, self._engine.hold, answers_s)
        if (stream := self._loaded.stream) is not None:
            # An engine that is in the middle of a long pass has learned little that is worth waiting for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEARNED_S):
                    await self._engine.call(stream.save)
        rest_s = timeout_s - (time.perf_counter() - began_s)
        report = await durability.flush(self._engine, max(0.0, rest_s))
        elapsed_ms = (time.perf_counter() - began_s) * 1000
        return _json(msgspec.structs.replace(report, pending=self._open, elapsed_ms=elapsed_ms))

    async def _flush(self, request: web.Request) -> web.Response:
        """Bring to disk what memory holds; requests go on."""
        return _json(await durability.flush(self._engine, _timeout_s(request)))

    async def _share(self, request: web.Request) -> web.Response:
        """Another share of memory for the prompt cache."""
        try:
            share = msgspec.json.decode(await request.read(), type=control.CacheShare)
        except msgspec.MsgspecError as err:
            raise error("invalid_request", f"the body is no share of memory: {err}") from None
        launch = self._launch
        await durability.set_ram_bytes(
            self._engine,
            max(0, share.ram_bytes),
            launch.memory_limit_bytes,
            launch.stream.reserve_bytes if launch.stream is not None else 0,
        )
        cache = self._engine.cache
        return _json(control.PromptCacheStats() if cache is None else cache.stats())

    async def _answer(self, endpoint: Endpoint, request: web.Request) -> web.StreamResponse:
        if self._draining:
            raise _draining_error()
        self._requests += 1
        self._open += 1
        self._idle.clear()
        log = RequestLog(_REQUEST_ID.get(), self._launch.model, self._trace)
        try:
            return await self._run(endpoint, request, log)
        except asyncio.CancelledError:
            log.outcome = "cancelled"
            raise
        except ApiError as err:
            self._refused += err.status < 500
            log.outcome = err.code
            raise
        except ConnectionError:
            log.outcome = "cancelled"
            raise
        except Exception:
            log.outcome = "internal_error"
            raise
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
            log.end()

    async def _run(self, endpoint: Endpoint, request: web.Request, log: RequestLog) -> web.StreamResponse:
        try:
            named = unquote(request.headers.get(control.HEADER_ADAPTER, "")) or None
            prepared = await self._preparer.prepare(endpoint.read, await request.read(), named)
        except NoRoom as refusal:
            if not (endpoint.fails_in_stream and refusal.prepared.request.stream):
                raise
            self._refused += 1
            return await self._failed(endpoint, request, log, refusal)
        log.begin(prepared.plans)
        answer = endpoint.writer(prepared, self._identity(endpoint, request, prepared.request.model))
        wanted = any(plan.top_logprobs is not None for plan in prepared.plans)
        token_bytes = await self._token_bytes.by_id() if wanted else None
        mailbox = Mailbox()
        rows = [
            Row(
                plan,
                self._text.answer(plan.format),
                mailbox.slot(index),
                token_bytes=token_bytes,
                adapters=prepared.adapters,
            )
            for index, plan in enumerate(prepared.plans)
        ]
        constraints = await prepared.held.constraints(len(rows))
        for row, constraint in zip(rows, constraints, strict=True):
            row.constraint = within_budget(row.plan.thinking, row.text, constraint)
        log.rows = rows
        self._engine.submit_all(rows)
        own_headers = _own_headers(prepared)
        try:
            with self._adapters.in_use(prepared.adapters):
                if prepared.request.stream:
                    return await _streamed(request, answer, mailbox, log, own_headers)
                return await _whole(answer, len(rows), mailbox, log, own_headers)
        finally:
            for row in rows:
                self._engine.cancel(row)

    async def _failed(
        self, endpoint: Endpoint, request: web.Request, log: RequestLog, refusal: NoRoom
    ) -> web.StreamResponse:
        """A stream that ends where it begins."""
        prepared = refusal.prepared
        answer = endpoint.writer(prepared, self._identity(endpoint, request, prepared.request.model))
        mailbox = Mailbox()
        mailbox.slot(0)([Failure(refusal)])
        return await _streamed(request, answer, mailbox, log, _own_headers(prepared))

    def _identity(self, endpoint: Endpoint, request: web.Request, model: str | None) -> Identity:
        headers = request.headers
        created = headers.get(control.HEADER_CREATED, "")
        return Identity(
            headers.get(control.HEADER_RESPONSE_ID) or f"{endpoint.id_prefix}{uuid.uuid4().hex}",
            int(created) if created.isdecimal() else int(time.time()),
            unquote(headers.get(control.HEADER_ASKED_MODEL, "")) or model or self._launch.model,
            headers.get(control.HEADER_PREVIOUS_ID) or None,
            _REQUEST_ID.get(),
        )


async def _whole(
    answer: Writer, rows: int, mailbox: Mailbox, log: RequestLog, headers: Mapping[str, str]
) -> web.Response:
    said: list[Said] = []
    running = rows
    while running:
        arrived = await mailbox.take()
        log.note(arrived)
        said += arrived
        running -= sum(isinstance(event, Finish) for _, event in arrived)
        if any(isinstance(event, Failure) for _, event in arrived):
            break
    body = await _put_together(answer.whole, said)
    return web.Response(body=body, content_type="application/json", headers=headers)


async def _put_together(write: Callable[[list[Said]], bytes], said: list[Said]) -> bytes:
    return await asyncio.to_thread(write, said) if len(said) > LOOP_EVENTS else write(said)


async def _streamed(
    request: web.Request,
    answer: Writer,
    mailbox: Mailbox,
    log: RequestLog,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            **headers,
        }
    )
    await response.prepare(request)
    if opening := answer.opening():
        await response.write(opening)
    silent_since_s = time.monotonic()
    while not answer.ended:
        said = await mailbox.take(max(0.0, silent_since_s + KEEP_ALIVE_S - time.monotonic()))
        log.note(said)
        data = await _put_together(answer.write, said) if said else b""
        # Not everything that a row says is shown to its client, who hears something all the same.
        if not (data or answer.ended) and time.monotonic() - silent_since_s >= KEEP_ALIVE_S:
            data = answer.keep_alive()
        if data:
            await response.write(data)
            silent_since_s = time.monotonic()
    await response.write_eof()
    return response


def _own_headers(prepared: Prepared) -> dict[str, str]:
    return {control.HEADER_REQUEST_ID: _REQUEST_ID.get(), **_warning(prepared.warnings)}


def _warning(warnings: Sequence[str]) -> dict[str, str]:
    """A `Warning` header (RFC 7234, code 299: what persists) for these, in a header's characters."""
    if not warnings:
        return {}
    # Only what there is room for: there may be any number of them, as long as a body.
    most = [text[:WARNING_CHARS] for text in warnings[:WARNING_CHARS]]
    text = "; ".join(most)[:WARNING_CHARS].encode("ascii", "replace").decode()
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    quoted = printable.replace("\\", "\\\\").replace('"', '\\"')
    return {"Warning": f'299 - "{quoted}"'}


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Whatever goes wrong before the first byte, in the protocol's envelope; the request's id on all."""
    _REQUEST_ID.set(request.headers.get(control.HEADER_REQUEST_ID) or f"req-{uuid.uuid4().hex[:16]}")
    try:
        return await handler(request)
    except ApiError as err:
        failure = err
    except web.HTTPRequestEntityTooLarge:
        failure = error("body_too_large", f"the body is larger than {BODY_LIMIT_BYTES} bytes")
    except web.HTTPNotFound:
        failure = error("not_found", f"no such path: {request.path}")
    except web.HTTPMethodNotAllowed as refused:
        allowed = ", ".join(sorted(refused.allowed_methods))
        failure = error("method_not_allowed", f"{request.path} takes {allowed}, not {request.method}")
    except asyncio.CancelledError:
        raise
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        # Nobody is there to be answered, and the log has said that the client left.
        return web.Response(status=CLIENT_LEFT_STATUS)
    except Exception as err:
        traceback.print_exc()
        failure = error("internal_error", f"the worker failed on this request: {type(err).__name__}")
    return web.Response(
        status=failure.status,
        body=errors.encode(failure, errors.protocol_of(request.path), _REQUEST_ID.get()),
        content_type="application/json",
        headers={control.HEADER_REQUEST_ID: _REQUEST_ID.get(), **failure.headers()},
    )


def _timeout_s(request: web.Request) -> float:
    """Raises ApiError 400 for a time-out that is none."""
    try:
        timeout_s = float(request.query.get("timeout_s", DRAIN_TIMEOUT_S))
    except ValueError:
        timeout_s = math.nan
    if not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise error("invalid_request", "timeout_s must be zero or more seconds", param="timeout_s")
    return timeout_s


def _json(body: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def _draining_error() -> ApiError:
    return error("shutting_down", "this model is being unloaded; try again", retry_after_s=1)


def _private_socket(path: str) -> socket.socket:
    """A bound UNIX socket that only this user may open. A file left by a dead worker is replaced."""
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(previous)
    return listener
