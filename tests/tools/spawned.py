"""One scripted worker, spawned as the parent spawns it: real pipes, a real socket, no parent.

`Spawned` holds the parent's ends of the pipes and owns the process; whoever makes one closes it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from mlxpool.shared.control import Heartbeat, Imported, Launch, Loading, Ready, Status, WorkerStats
from tests.tools import sse
from tests.tools.scripted_script import read_events

WORKER = Path(__file__).with_name("scripted_worker.py")
# Long enough for a busy machine; a wait that passes it is a failure, never a pass.
PATIENCE_S = 60.0


class Spawned:
    """One worker process and the parent's ends of its pipes."""

    def __init__(self, folder: Path, socket_path: Path, *, by_name: bool = True) -> None:
        self.folder = folder
        self.socket_path = socket_path
        tether_r, self.tether = os.pipe()
        status_r, status_w = os.pipe()
        argv = [sys.executable, str(WORKER), "--tether-fd", str(tether_r), "--status-fd", str(status_w)]
        if by_name:
            argv += ["--models", str(folder.parent), "--name", folder.name]
        self.process = subprocess.Popen(
            argv, pass_fds=(tether_r, status_w), stderr=subprocess.PIPE, start_new_session=True
        )
        os.close(tether_r)
        os.close(status_w)
        self._status = os.fdopen(status_r, "rb")

    def go(self, **changes: Any) -> None:
        """Sends the Launch."""
        launch = Launch(
            model=self.folder.name,
            path=str(self.folder),
            socket=str(self.socket_path),
            context=2048,
            batch=8,
            kv_pool_bytes=1000,
            memory_limit_bytes=10**9,
        )
        os.write(self.tether, msgspec.json.encode(msgspec.structs.replace(launch, **changes)) + b"\n")

    def line(self) -> bytes:
        """The next raw line of the status pipe."""
        return self._status.readline()

    def status(self) -> Status:
        """The next message but heartbeats."""
        while isinstance(message := msgspec.json.decode(self.line(), type=Status), Heartbeat):
            pass
        return message

    def ready(self, **changes: Any) -> Spawned:
        """Goes through a healthy start, with these fields of the Launch."""
        assert self.status() == Imported(backend="scripted")
        self.go(**changes)
        while not isinstance(message := self.status(), Ready):
            assert isinstance(message, Loading)
        return self

    def heartbeat(self, wanted: Callable[[Heartbeat], bool]) -> Heartbeat:
        """The first heartbeat from now on that is as wanted."""
        while True:
            message = msgspec.json.decode(self.line(), type=Status)
            if isinstance(message, Heartbeat) and wanted(message):
                return message

    def hang_up(self) -> None:
        """Closes the tether, as a parent that dies does."""
        if self.tether >= 0:
            os.close(self.tether)
            self.tether = -1

    def close(self) -> None:
        """Ends what is left."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        self._status.close()
        self.hang_up()

    def connect(self) -> socket.socket:
        """A connection to its socket."""
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE_S)
        client.connect(str(self.socket_path))
        return client

    def send(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Any:
        """A connection on which this request has been sent."""
        lines = [f"{method} {path} HTTP/1.1", "Host: worker", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        client = self.connect()
        client.sendall(("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode() + body)
        return client

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request."""
        return sse.read_answer(self.send(method, path, body, headers))

    def chat(self, prompt: str, **fields: Any) -> tuple[int, dict[str, str], bytes]:
        """A chat of one message."""
        return self.ask("POST", "/v1/chat/completions", chat_body(prompt, **fields))

    def events(self) -> list[str]:
        """The names of its life events so far."""
        return [event["event"] for event in read_events(self.folder)]

    def stats(self) -> WorkerStats:
        """Its counters."""
        return msgspec.json.decode(self.ask("GET", "/stats")[2], type=WorkerStats)


def chat_body(prompt: str, **fields: Any) -> bytes:
    """A chat request of one message."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}).encode()


def eventually(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; a state of another process can only be polled."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.005)
