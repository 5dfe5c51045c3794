"""Talking to the running server of a home: finding it, asking it, reading its errors.

Plain http.client: a command asks a question or reads one stream, and an HTTP library's import would take
longer than that. What the server answers is read into structs that keep what the commands show.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from mlxpool.parent.cli.common import Failure
from mlxpool.parent.places import Up, is_process, read_up
from mlxpool.shared.config import Settings

T = TypeVar("T")

# /health answers within milliseconds; a server that takes longer than this is not well.
_HEALTH_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 30.0
# Keep-alives come every 10 s while a model loads or thinks: silence of this length is a dead server.
_STREAM_TIMEOUT_S = 120.0


class WorkerView(msgspec.Struct):
    """A worker in /api/pool."""

    model: str
    state: str
    pid: int | None = None
    since: float | None = None
    planned_bytes: int = 0
    footprint_bytes: int | None = None
    active: int = 0
    queued: int = 0
    restarts: int = 0
    pinned: bool = False
    last_used: float | None = None
    reason: str | None = None


class PoolView(msgspec.Struct):
    """The answer of /api/pool."""

    budget_bytes: int
    reserved_bytes: int
    workers: list[WorkerView]
    queue: list[dict[str, Any]] = []
    leases: dict[str, Any] = {}
    counters: dict[str, int] = {}


class _Error(msgspec.Struct):
    message: str


class _Envelope(msgspec.Struct):
    error: _Error


class Client:
    """One running server. Every method raises Failure with the server's own words."""

    def __init__(self, up: Up, key: str | None) -> None:
        self.up = up
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, kind: type[T], timeout_s: float = _REQUEST_TIMEOUT_S) -> T:
        return self._decode(self._request("GET", path, None, timeout_s), kind)

    def post(self, path: str, body: object, kind: type[T]) -> T:
        return self._decode(self._request("POST", path, body, _REQUEST_TIMEOUT_S), kind)

    def stream(self, path: str, body: object) -> Iterator[bytes]:
        """The data of each server-sent event, without the final [DONE]. Closing it leaves the stream."""
        connection, response = self._request("POST", path, body, _STREAM_TIMEOUT_S)
        try:
            while line := response.readline():
                field, _, value = line.rstrip(b"\r\n").partition(b":")
                if field == b"data" and value.strip() != b"[DONE]":
                    yield value.strip()
        except (OSError, http.client.HTTPException) as problem:
            raise Failure(f"{self.up.url} stopped answering: {problem}") from None
        finally:
            connection.close()

    def pool(self) -> PoolView:
        return self.get("/api/pool", PoolView)

    def worker(self, model: str) -> WorkerView | None:
        """The worker of a model, None where it has none."""
        return next((worker for worker in self.pool().workers if worker.model == model), None)

    def act(self, model: str, action: str, body: object = None) -> dict[str, Any]:
        """POST /api/models/{model}/{action}."""
        return self.post(f"/api/models/{quote(model, safe='')}/{action}", body or {}, dict[str, Any])

    def _request(
        self, method: str, path: str, body: object, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.up.address, self.up.port, timeout=timeout_s)
        headers = {**self._headers, "Content-Type": "application/json"}
        payload = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise Failure(_error_text(response.status, response.read()))
        except (OSError, http.client.HTTPException) as problem:
            connection.close()
            raise Failure(f"{self.up.url} does not answer: {problem or type(problem).__name__}") from None
        except Failure:
            connection.close()
            raise
        return connection, response

    def _decode(
        self, answered: tuple[http.client.HTTPConnection, http.client.HTTPResponse], kind: type[T]
    ) -> T:
        connection, response = answered
        try:
            return msgspec.json.decode(response.read(), type=kind)
        except msgspec.DecodeError as problem:
            raise Failure(f"{self.up.url} is no mlxpool server, or another version: {problem}") from None
        except (OSError, http.client.HTTPException) as problem:
            raise Failure(f"{self.up.url} stopped answering: {problem}") from None
        finally:
            connection.close()


def error_message(body: bytes) -> str | None:
    """The message of an error envelope, None where `body` is none."""
    try:
        return msgspec.json.decode(body, type=_Envelope).error.message
    except msgspec.DecodeError:
        return None


def _error_text(status: int, body: bytes) -> str:
    return error_message(body) or f"the server answered {status}: {body[:200].decode(errors='replace')}"


def find(settings: Settings) -> Client | None:
    """The running server of this home, None where there is none."""
    up = read_up(settings.home)
    if up is None or not is_process(up):
        return None
    client = Client(up, settings.client_key)
    try:
        client.get("/health", dict[str, Any], _HEALTH_TIMEOUT_S)
    except Failure:
        return None
    return client


def need(settings: Settings) -> Client:
    """The running server of this home. Raises Failure where there is none."""
    client = find(settings)
    if client is not None:
        return client
    up = read_up(settings.home)
    if up is not None and is_process(up):
        raise Failure(f"the server (pid {up.pid}) does not answer at {up.url}/health")
    raise Failure(f"no server is running for {settings.home}; start one with `mlxpool up`")
