"""One worker process: its pipes, its signals, its end.

`python -m mlxpool.worker` in a session (so a process group) of its own, with a tether and a status pipe
(shared/control.py). What the process says and does comes back through `Reports`, on the event loop; lines
that break the protocol are reported as such and believed in nothing. The exit is learnt with WNOWAIT and the
process is only reaped on the loop, so its pid can't be another's while a signal is on its way.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from mlxpool.shared.control import MAX_LINE_BYTES, Launch, Status

from . import reaper
from .worker_log import OutputReader, RotatingLog

# Between SIGTERM and SIGKILL. A worker that was drained has nothing left to do.
STOP_GRACE_S = 3.0
# The log's reader may be a moment behind the exit; its last lines are the reason that people read.
OUTPUT_GRACE_S = 0.5
READ_BYTES = 64 * 1024


class Reports(Protocol):
    """What a process tells its owner. Called on the event loop."""

    def status(self, worker: int, message: Status) -> None:
        """A well-formed line of the status pipe."""

    def nonsense(self, worker: int, what: str) -> None:
        """A line that is none: `what` says why."""

    def exited(self, worker: int, reason: str) -> None:
        """The process is gone and reaped: "killed by SIGKILL", "exit code 3"."""


class WorkerProcess:
    """A running worker. All methods belong to the event loop's thread."""

    def __init__(self, worker: int, model: str, socket: Path, log: RotatingLog, reports: Reports) -> None:
        self.worker = worker
        self.model = model
        self.socket = socket
        self._log = log
        self._reports = reports
        self._loop = asyncio.get_running_loop()
        self._tether = -1
        self._status = -1
        self._buffer = b""
        self._skipping = False
        self._process: subprocess.Popen[bytes] | None = None
        self._output: OutputReader | None = None
        self._record: Path | None = None
        self._grace: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """The process id, also after its end."""
        return self._process.pid if self._process is not None else 0

    def spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start it. Raises OSError."""
        tether_read, self._tether = os.pipe()
        self._status, status_write = os.pipe()
        os.set_blocking(self._status, False)
        pipes = ["--tether-fd", str(tether_read), "--status-fd", str(status_write)]
        pipes += ["--name", self.model] if self.model else []
        try:
            self._process = subprocess.Popen(
                [*argv, *pipes],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(tether_read, status_write),
                start_new_session=True,
            )
        except OSError:
            os.close(self._tether)
            os.close(self._status)
            raise
        finally:
            os.close(tether_read)
            os.close(status_write)
        assert self._process.stdout is not None
        try:
            self._record = reaper.record(self.socket.parent, self._process.pid)
        except OSError as err:  # then the next parent can't end it should this one be killed: rather none
            self._log.write(f"--- no record of the worker can be kept: {err}\n".encode())
            self.kill()
        self._output = OutputReader(self._process.stdout, self._log)  # type: ignore[arg-type]
        self._output.start()
        threading.Thread(target=self._watch, daemon=True, name=f"exit {self.model}").start()
        self._loop.add_reader(self._status, self._read_status)

    def adopt(self, model: str, log: RotatingLog) -> None:
        """A spare becomes a model's worker."""
        self.model = model
        self._log = log
        if self._output is not None:
            self._output.log = log

    def go(self, launch: Launch) -> None:
        """Tell it which model to load. A process that is gone is reported by its exit, not here."""
        try:
            os.write(self._tether, msgspec.json.encode(launch) + b"\n")
        except OSError:
            pass

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after STOP_GRACE_S."""
        self._signal(signal.SIGTERM, group=False)
        if self._grace is None:
            self._grace = self._loop.call_later(STOP_GRACE_S, self.kill)

    def kill(self) -> None:
        """SIGKILL to its whole group; a stopped process dies of it too."""
        self._signal(signal.SIGKILL, group=True)

    def tail(self) -> list[str]:
        """The last lines it wrote."""
        return self._output.tail() if self._output is not None else []

    def _signal(self, number: signal.Signals, *, group: bool) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        try:
            if group:
                os.killpg(self._process.pid, number)
            else:
                os.kill(self._process.pid, number)
        except ProcessLookupError:
            pass

    def _read_status(self) -> bool:
        """Read what is there. False when the pipe has nothing (more) to say."""
        try:
            data = os.read(self._status, READ_BYTES)
        except OSError as err:
            data = b""
            if isinstance(err, BlockingIOError):
                return False
        if not data:
            self._loop.remove_reader(self._status)
            return False
        *lines, rest = (self._buffer + data).split(b"\n")
        self._buffer = rest
        for line in lines:
            if self._skipping or len(line) > MAX_LINE_BYTES:
                self._skipping = False
                self._reports.nonsense(self.worker, f"a status line of over {MAX_LINE_BYTES} bytes")
            else:
                self._read_line(line)
        if len(rest) > MAX_LINE_BYTES:
            self._buffer, self._skipping = b"", True
        return True

    def _read_line(self, line: bytes) -> None:
        try:
            message = msgspec.json.decode(line, type=Status)
        except (msgspec.MsgspecError, UnicodeDecodeError) as err:
            self._reports.nonsense(self.worker, f"a status line that is none ({err}): {line[:80]!r}")
            return
        self._reports.status(self.worker, message)

    def _watch(self) -> None:
        """A thread: wait for the end without reaping, then let the loop do the rest."""
        assert self._process is not None
        assert self._output is not None
        wait_without_reaping(self._process.pid)
        # What it started itself (group members) would hold the pipes open.
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._output.join(OUTPUT_GRACE_S)
        try:
            self._loop.call_soon_threadsafe(self._gone)
        except RuntimeError:
            pass  # the loop is closed: the parent itself is on its way out

    def _gone(self) -> None:
        assert self._process is not None
        code = self._process.wait()
        if self._grace is not None:
            self._grace.cancel()
        while self._read_status():
            pass  # what it said before it died: its own reason for it, often
        self._loop.remove_reader(self._status)
        os.close(self._status)
        os.close(self._tether)
        for path in (self._record, self.socket):
            if path is not None:
                path.unlink(missing_ok=True)
        self._reports.exited(self.worker, describe_exit(code))


def wait_without_reaping(pid: int) -> None:
    """Block until a child has ended; it stays a zombie, so its pid stays its own."""
    if sys.platform == "darwin":  # os.waitid is there from Python 3.13 on only
        queue = select.kqueue()
        try:
            ends = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            queue.control([ends], 1, None)
        except ProcessLookupError:
            pass  # it has ended already
        finally:
            queue.close()
        return
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def describe_exit(code: int) -> str:
    """How a process ended, from its return code as subprocess gives it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
