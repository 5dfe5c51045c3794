"""scripted_up.py in a fork of a process that has imported it: most of the suite's servers are scripted
parents, and each would spend half a second of a core on imports alone.

`ForkedUp(argv, env, log)` is as much of a subprocess.Popen as `Served` uses. One process of the tests has one
nursery, started with the first parent; it holds nothing but modules and tells of each child's end once it has
waited for it. It ends with the process whose it is, however that ends, and takes its children along. Run as a
file, this is the nursery.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any, NoReturn

if not __package__:
    # Started as a file: `tests` is imported from the folder that holds it.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

READ_BYTES = 1 << 16


class ForkedUp:
    """A scripted parent, forked off with this environment; what it prints goes to `log`."""

    def __init__(self, argv: list[str], env: dict[str, str], log: IO[bytes]) -> None:
        self.args = argv
        self.returncode: int | None = None
        self._ended = threading.Event()
        self.pid = _nursery().fork(self, json.dumps({"argv": argv, "env": env}).encode(), log.fileno())

    def ended(self, returncode: int) -> None:
        """The nursery's word that it is over."""
        self.returncode = returncode
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Nursery:
    """The nursery as the tests see it: requests to fork go there, pids and ends come back."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._asked: queue.SimpleQueue[ForkedUp] = queue.SimpleQueue()
        self._forked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        threading.Thread(target=self._hear, daemon=True).start()

    def fork(self, child: ForkedUp, request: bytes, log: int) -> int:
        with self._lock:
            self._asked.put(child)
            # One byte, so that it goes out together with the descriptor whatever there is room for.
            socket.send_fds(self._socket, [request[:1]], [log])
            self._socket.sendall(request[1:] + b"\n")
            return self._forked.get(timeout=60)

    def _hear(self) -> None:
        children: dict[int, ForkedUp] = {}
        with self._socket.makefile("rb") as lines:
            for line in lines:
                told: dict[str, int] = json.loads(line)
                if "returncode" in told:
                    children.pop(told["pid"]).ended(told["returncode"])
                else:
                    children[told["pid"]] = self._asked.get()
                    self._forked.put(told["pid"])


@functools.cache
def _nursery() -> _Nursery:
    return _Nursery()


# The nursery itself


def _tend(tests: socket.socket) -> list[str]:
    """Fork what is asked for and tell what has ended, until the tests are gone. Returns in a child, with its
    arguments."""
    children: set[int] = set()
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(tests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if woken in ready:
                woken.recv(4096)
            try:
                if tests in ready:
                    request, log = _asked_for(tests)
                    pid = os.fork()
                    if not pid:
                        break
                    os.close(log)
                    children.add(pid)
                    _tell(tests, pid=pid)
                _tell_of_ended(tests, children)
            except ConnectionError:
                _end(children)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for end in (tests, woken, wake):
        end.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    return list(request["argv"])


def _asked_for(tests: socket.socket) -> tuple[dict[str, Any], int]:
    """A request and its log's descriptor. Raises ConnectionError when nobody is there to ask."""
    line, descriptors = b"", []
    while not line.endswith(b"\n"):
        read, came, _, _ = socket.recv_fds(tests, READ_BYTES, 1)
        if not read:
            raise ConnectionResetError("the tests are gone")
        line += read
        descriptors += came
    return json.loads(line), descriptors[0]


def _tell_of_ended(tests: socket.socket, children: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            children.discard(pid)
            _tell(tests, pid=pid, returncode=os.waitstatus_to_exitcode(status))


def _end(children: set[int]) -> NoReturn:
    """Nobody waits for the children any more. They are not waited for, so their numbers are still theirs."""
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _tell(tests: socket.socket, **what: int) -> None:
    tests.sendall(json.dumps(what).encode() + b"\n")


def main(descriptor: int) -> int:
    """In the nursery it never returns; in a child it is the app."""
    import mlxpool.parent.serve  # noqa: F401
    from tests.tools import scripted_up

    # What the children share is left where it is.
    gc.collect()
    gc.freeze()
    argv = _tend(socket.socket(fileno=descriptor))
    sys.argv = [scripted_up.__file__, *argv]
    return scripted_up.main(argv)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
