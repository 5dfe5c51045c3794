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
from mlxpool.parent.hints import command
from mlxpool.parent.run_folder import Address, read_address
from mlxpool.shared.config import Settings

T = TypeVar("T")

# A server publishes its address after its process began; a process that began later only has its old pid.
_CLOCK_TOLERANCE_S = 2.0

# /health answers within milliseconds; a server that takes longer than this is not well.
_HEALTH_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 30.0
# A model's files are gone before the answer, and there may be hundreds of gigabytes of them.
_DELETE_TIMEOUT_S = 300.0
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
    prompt_cache_bytes: int = 0
    queue: list[dict[str, Any]] = []
    leases: dict[str, Any] = {}
    counters: dict[str, int] = {}


class ModelState(msgspec.Struct):
    """The answer of load, unload, pin and unpin: the model's state at that moment."""

    id: str
    state: str
    pinned: bool = False
    reason: str | None = None


class ServerEvent(msgspec.Struct, frozen=True):
    """One server-sent event."""

    type: str
    data: bytes


class _Error(msgspec.Struct):
    message: str


class _Envelope(msgspec.Struct):
    error: _Error


def is_running(address: Address) -> bool:
    """Whether the process that published the address still runs; another one may have its pid by now."""
    import psutil

    try:
        process = psutil.Process(address.pid)
        return (
            process.create_time() <= address.started + _CLOCK_TOLERANCE_S
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False


class Client:
    """One running server. Every method raises Failure with the server's own words."""

    def __init__(self, address: Address, key: str | None) -> None:
        self.address = address
        # A server that listens everywhere is reached on this machine's own address.
        wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        self._host = wildcards.get(address.host, address.host)
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{address.port}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str, kind: type[T], timeout_s: float = _REQUEST_TIMEOUT_S) -> T:
        return self._decode(self._request("GET", path, None, timeout_s), kind)

    def post(self, path: str, body: object, kind: type[T]) -> T:
        return self._decode(self._request("POST", path, body, _REQUEST_TIMEOUT_S), kind)

    def delete(self, path: str, kind: type[T]) -> T:
        return self._decode(self._request("DELETE", path, None, _DELETE_TIMEOUT_S), kind)

    def stream(self, path: str, body: object) -> Iterator[bytes]:
        """The data of each server-sent event, without the final [DONE]. Closing it leaves the stream."""
        connection, response = self._request("POST", path, body, _STREAM_TIMEOUT_S)
        try:
            while line := response.readline():
                field, _, value = line.rstrip(b"\r\n").partition(b":")
                if field == b"data" and value.strip() != b"[DONE]":
                    yield value.strip()
        except (OSError, http.client.HTTPException) as problem:
            raise Failure(f"{self.url} stopped answering: {problem}") from None
        finally:
            connection.close()

    def events(self, path: str) -> Iterator[ServerEvent]:
        """The events of a stream, to its end. Closing it leaves the stream."""
        connection, response = self._request("GET", path, None, _STREAM_TIMEOUT_S)
        kind = ""
        try:
            while line := response.readline():
                field, _, value = line.rstrip(b"\r\n").partition(b":")
                if field == b"event":
                    kind = value.strip().decode(errors="replace")
                elif field == b"data":
                    yield ServerEvent(kind, value.strip())
        except (OSError, http.client.HTTPException) as problem:
            raise Failure(f"{self.url} stopped answering: {problem}") from None
        finally:
            connection.close()

    def pool(self) -> PoolView:
        return self.get("/api/pool", PoolView)

    def worker(self, model: str) -> WorkerView | None:
        """The worker of a model, None where it has none."""
        return next((worker for worker in self.pool().workers if worker.model == model), None)

    def act(self, model: str, action: str, body: object = None) -> ModelState:
        """POST /api/models/{model}/{action}."""
        return self.post(f"/api/models/{quote(model, safe='')}/{action}", body or {}, ModelState)

    def _request(
        self, method: str, path: str, body: object, timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._host, self.address.port, timeout=timeout_s)
        headers = {**self._headers, "Content-Type": "application/json"}
        payload = None if body is None else msgspec.json.encode(body)
        try:
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise Failure(_error_text(response.status, response.read()))
        except (OSError, http.client.HTTPException) as problem:
            connection.close()
            raise Failure(f"{self.url} does not answer: {problem or type(problem).__name__}") from None
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
            raise Failure(f"{self.url} is no mlxpool server, or another version: {problem}") from None
        except (OSError, http.client.HTTPException) as problem:
            raise Failure(f"{self.url} stopped answering: {problem}") from None
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
    """The running server of this home, None where there is none or it does not answer."""
    address = read_address(settings.home)
    if address is None or not is_running(address):
        return None
    client = Client(address, settings.client_key)
    try:
        client.get("/health", dict[str, Any], _HEALTH_TIMEOUT_S)
    except Failure:
        return None
    return client


def need(settings: Settings) -> Client:
    """The running server of this home. Raises Failure where there is none, or it does not answer."""
    address = read_address(settings.home)
    if address is None or not is_running(address):
        up = command("up", settings.home)
        raise Failure(f"no server is running for {settings.home}; start one with {up}")
    client = Client(address, settings.client_key)
    client.get("/health", dict[str, Any], _HEALTH_TIMEOUT_S)
    return client
