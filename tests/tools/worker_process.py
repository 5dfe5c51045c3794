"""A real worker process for tests: spawned over the two pipes as the parent does it, spoken to over its
socket.

`WorkerProcess` owns the process and both pipe ends; use it as a context manager, so that nothing is left
behind whatever a test does.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared import backend, control

READY_TIMEOUT_S = 120.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float = 300) -> None:
        super().__init__("worker", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class WorkerProcess:
    """`python -m mlxpool.worker` with a tether, a status pipe and a socket in a folder of its own."""

    def __init__(
        self, model: str | Path, env: dict[str, str] | None = None, shell: str = "", **launch: Any
    ) -> None:
        """shell: what a shell does first, in the worker's own process. launch: fields of its Launch."""
        self._folder = tempfile.TemporaryDirectory(prefix="mlxw")
        self.socket = os.path.join(self._folder.name, "s")
        self.log = Path(self._folder.name) / "log"
        self.statuses: list[control.Status] = []
        self._changed = threading.Condition()
        tether_read, self.tether = os.pipe()
        status_read, status_write = os.pipe()
        environment = backend.worker_environment(backend.detect(), {**os.environ, **(env or {})})
        self.began_s = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "/bin/sh", "-c", f'{shell}\nexec "$@"', "sh", sys.executable, "-m", "mlxpool.worker",
                    "--tether-fd", str(tether_read), "--status-fd", str(status_write),
                ],
                pass_fds=(tether_read, status_write), process_group=0, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(tether_read)
        os.close(status_write)
        threading.Thread(target=self._read_status, args=(status_read,), daemon=True).start()
        settings: dict[str, Any] = {
            "model": "tiny", "path": str(model), "socket": self.socket, "context": 2048, "batch": 8,
            "kv_pool_bytes": 1 << 30, "memory_limit_bytes": 4 << 30,
        }  # fmt: skip
        self.launch = control.Launch(**{**settings, **launch})

    def go(self) -> None:
        """Tell the worker to load."""
        os.write(self.tether, msgspec.json.encode(self.launch) + b"\n")

    def _read_status(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            for line in pipe:
                status = msgspec.json.decode(line, type=control.Status)
                with self._changed:
                    self.statuses.append(status)
                    self._changed.notify_all()

    def wait_for(self, kind: type[Any], timeout_s: float = READY_TIMEOUT_S) -> Any:
        """The first status of this kind; fails with the worker's log when it doesn't come."""

        def found() -> Any:
            return next((status for status in self.statuses if isinstance(status, kind)), None)

        with self._changed:
            self._changed.wait_for(found, timeout_s)
            status = found()
        assert status is not None, f"no {kind.__name__}: {self.statuses[-3:]}\n{self.log.read_text()}"
        return status

    def __enter__(self) -> WorkerProcess:
        return self

    def ready(self) -> WorkerProcess:
        self.go()
        self.wait_for(control.Ready)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self.tether)
        self._folder.cleanup()

    # HTTP

    def connection(self) -> http.client.HTTPConnection:
        return _UnixConnection(self.socket)

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded JSON, headers. A body of bytes is sent as it is."""
        connection = self.connection()
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, headers or {})
            response = connection.getresponse()
            return response.status, json.loads(response.read()), dict(response.headers)
        finally:
            connection.close()

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        """A whole answer's body, which must be a 200."""
        status, body, _ = self.request("POST", "/v1/chat/completions", chat_body(content, **fields))
        assert status == 200, body
        return dict(body)

    def text(self, content: str, **fields: Any) -> str:
        """A whole answer's text."""
        return str(self.chat(content, **fields)["choices"][0]["message"]["content"])

    def stream(
        self, content: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> Generator[dict[str, Any], None, None]:
        """Chunks of a streamed answer; checks that it ends with [DONE] and nothing after it."""
        connection = self.connection()
        body = json.dumps(chat_body(content, stream=True, **fields)).encode()
        try:
            connection.request("POST", "/v1/chat/completions", body, headers or {})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            done = False
            for line in response:
                if not line.strip():
                    continue
                assert not done, "something came after [DONE]"
                assert line.startswith(b"data: "), line
                if line.strip() == b"data: [DONE]":
                    done = True
                else:
                    yield json.loads(line[6:])
            assert done, "the stream ended without [DONE]"
        finally:
            connection.close()

    def stats(self) -> dict[str, Any]:
        return dict(self.request("GET", "/stats")[1])


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def streamed_text(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
