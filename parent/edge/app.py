"""The aiohttp application: its routes, and what holds for every request on each of them.

Order matters: Host and Origin before anything, then the key, then the route. Whatever a handler raises leaves
as the protocol's own error with the request's id on it; nothing a client sends ends in a traceback or an HTML
page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from mlxpool.parent.adapters import Shelf
from mlxpool.parent.history.store import HistoryStore
from mlxpool.parent.jobs.runner import Jobs
from mlxpool.parent.library import Library
from mlxpool.parent.pool.service import PoolService
from mlxpool.shared.config import Server
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut

from . import security
from .adapter_routes import add_adapter_routes
from .cache_routes import add_cache_routes
from .config_routes import ConfigRoutes
from .count_tokens import CountTokens
from .events import LOG_HISTORY_LINES, EventHub, EventRoutes
from .jobs_routes import add_job_routes
from .library_routes import add_library_routes
from .metrics import Metrics, RelayMetrics
from .model_routes import ModelRoutes
from .models import ModelListing
from .openapi import OpenApi
from .pool_routes import PoolRoutes
from .relay import Relay
from .reply import REQUEST_ID, client_protocol, error_response, json_response, request_id
from .responses_routes import add_response_routes
from .static import add_static_routes, is_static_path
from .trace import Trace

logger = logging.getLogger("mlxpool.edge")

MAX_BODY_BYTES = 64 * 2**20
# What the HTTP library undoes without further packages.
BODY_ENCODINGS = frozenset({"identity", "gzip", "deflate"})
# Answered without a key: a monitor or launchd asks whether the server lives, and learns nothing else.
OPEN_PATHS = frozenset({"/health"})


class Parts(msgspec.Struct, frozen=True):
    """What the routes are about. server: the [server] settings in effect; reload: see `Reloader`."""

    pool: PoolService
    library: Library
    jobs: Jobs
    hub: EventHub
    trace: Trace
    server: Callable[[], Server]
    reload: Callable[[], object]
    history: HistoryStore


def make_app(parts: Parts) -> web.Application:
    """The application over a running pool and its jobs."""
    pool, library = parts.pool, parts.library
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_guard(parts.server)], logger=logger)
    app.on_response_prepare.append(_finish_headers(parts.server))
    observed = RelayMetrics()
    relay = Relay(pool, library, observed, parts.trace)
    counting = CountTokens(library)
    app.on_cleanup.append(counting.close)
    shelf = Shelf(library.adapters)
    listing = ModelListing(pool, library, shelf)
    pools, model = PoolRoutes(pool, library), ModelRoutes(pool, library)
    events = EventRoutes(
        parts.hub, parts.jobs.store.rows, partial(pool.last_log_lines, count=LOG_HISTORY_LINES), library.names
    )
    started = time.time()

    async def health(_: web.Request) -> web.Response:
        return json_response({"status": "ok", "uptime_s": round(time.time() - started, 3)})

    app.add_routes(
        [
            web.get("/health", health),
            web.post("/v1/chat/completions", relay.chat),
            web.post("/v1/completions", relay.completions),
            web.post("/v1/messages", relay.messages),
            web.post("/v1/messages/count_tokens", counting.count),
            web.get("/openapi.json", OpenApi().document),
            web.get("/v1/models", listing.list_models),
            web.get("/v1/models/{id:.+}", listing.one_model),
            web.get("/api/pool", pools.view),
            web.post("/api/models/{id:.+}/load", pools.load),
            web.post("/api/models/{id:.+}/unload", pools.unload),
            web.post("/api/models/{id:.+}/pin", pools.pin),
            web.post("/api/models/{id:.+}/unpin", pools.unpin),
            web.get("/api/models/{id:.+}/stats", model.stats),
            web.get("/api/models/{id:.+}/experts", model.experts),
            web.get("/api/models/{id:.+}/logs", model.logs),
            web.get("/api/events", events.events),
            web.get("/metrics", Metrics(pool, observed, parts.history).metrics),
            web.post("/api/config/reload", ConfigRoutes(parts.reload).reload),
        ]
    )
    add_response_routes(app, relay, library, parts.history, MAX_BODY_BYTES)
    add_adapter_routes(app, pool, library, shelf)
    add_library_routes(app, pool, library)
    add_cache_routes(app, pool)
    add_job_routes(app, parts.jobs)
    add_static_routes(app)
    return app


def _guard(live: Callable[[], Server]) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request_id(request.headers.get("X-Request-Id"))
        server = live()
        try:
            _check(request, server)
            if request.method == hdrs.METH_OPTIONS and security.origin_is_allowed(request.headers, server):
                return web.Response(status=204, headers=security.preflight_headers(request.headers))
            if (request.content_length or 0) > MAX_BODY_BYTES:
                raise _too_large()
            encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower()
            if encoding not in BODY_ENCODINGS:
                raise error(
                    "invalid_request", f"bodies in {cut(encoding)!r} are not read; send gzip, deflate or none"
                )
            return await handler(request)
        except ApiError as err:
            return error_response(request, err)
        except web.HTTPException as err:
            return error_response(request, _of_http(request, err))
        except (web.RequestPayloadError, HttpProcessingError) as err:
            return error_response(
                request, error("invalid_request", f"the body can't be read: {_first_line(err)}")
            )
        except ConnectionError:
            raise
        except Exception:
            logger.exception("request %s: %s %s", request[REQUEST_ID], request.method, request.path)
            if request.transport is None or request.transport.is_closing():
                raise
            return error_response(
                request,
                error("internal_error", f"the server failed; its log has request {request[REQUEST_ID]}"),
            )

    return guard


def _check(request: web.Request, server: Server) -> None:
    headers = request.headers
    refusal = security.check_host(headers, server) or security.check_origin(headers, server)
    # A preflight carries no key; what it asks leave for is checked when it comes.
    is_open = request.path in OPEN_PATHS or is_static_path(request.path)
    if refusal is None and not is_open and request.method != hdrs.METH_OPTIONS:
        refusal = security.check_key(headers, server)
    if refusal is not None:
        raise refusal


def _of_http(request: web.Request, err: web.HTTPException) -> ApiError:
    """aiohttp's own refusals (no such route, wrong method, too large a body) as ours."""
    if err.status == 404:
        return error("not_found", f"there is no {request.method} {cut(request.path)} here")
    if err.status == 405:
        allowed = err.headers.get("Allow", "")
        return error(
            "method_not_allowed", f"{cut(request.path)} does not take {request.method}; use {allowed}"
        )
    if err.status == 413:
        return _too_large()
    return ApiError(err.status, "invalid_request", err.reason)


def _first_line(err: BaseException) -> str:
    """The innermost reason: the HTTP library wraps it into its own."""
    while err.__cause__ is not None:
        err = err.__cause__
    return cut((str(getattr(err, "message", "")) or str(err)).strip().partition("\n")[0])


def _too_large() -> ApiError:
    return error("body_too_large", f"the body is over the limit of {MAX_BODY_BYTES // 2**20} MiB")


def _finish_headers(
    live: Callable[[], Server],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def finish(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-request-id"] = request.get(REQUEST_ID) or request_id(None)
        if client_protocol(request) == "anthropic":
            response.headers["request-id"] = response.headers["x-request-id"]
        response.headers.pop("Server", None)
        if security.origin_is_allowed(request.headers, live()):
            response.headers.update(security.cors_headers(request.headers))

    return finish
