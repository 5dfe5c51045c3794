"""One job's process: its lines, its signals, its end.

It runs in a session (so a process group) of its own with a tether (shared/tether.py): a parent that is killed
takes it and all it has started along. stdout and stderr are one pipe; lines of the job protocol
(`shared/job_lines.py`) are handed on, the last others are what a crash is explained with. As with workers,
the exit is learnt without reaping, so its pid can't be another's while a signal is on its way.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxpool.parent.pool import reaper
from mlxpool.parent.pool.process import READ_BYTES, describe_exit, wait_without_reaping
from mlxpool.shared.job_lines import Line, read_line

# Between SIGTERM and SIGKILL: a job's work is staged, so it has nothing to save.
STOP_GRACE_S = 3.0
# For the rest of a killed group: one of it may stay as a zombie for ever where nothing reaps orphans.
GROUP_LOOKS = 100
GROUP_LOOK_INTERVAL_S = 0.01
# Last lines that are no messages: what a crash is explained with.
TAIL_LINES = 5
TAIL_LINE_CHARS = 400
# A line longer than this is no message and is not worth holding.
MAX_LINE_BYTES = 1 << 20


class JobProcess:
    """Runs once. All methods belong to the event loop's thread."""

    def __init__(self, on_line: Callable[[Line], None]) -> None:
        self._on_line = on_line
        self._process: subprocess.Popen[bytes] | None = None
        self._tether = -1
        self._buffer = b""
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._grace: asyncio.TimerHandle | None = None

    async def run(self, argv: Sequence[str], env: Mapping[str, str], run_folder: Path) -> str | None:
        """Until it and its group are gone. None where it exited 0, else how it ended. Raises OSError."""
        process = self._spawn(argv, env)
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        record = reaper.record(run_folder, process.pid)
        output = process.stdout.fileno()
        os.set_blocking(output, False)
        loop.add_reader(output, self._read, output)
        try:
            await loop.run_in_executor(None, wait_without_reaping, process.pid)
        finally:
            # What it started itself (pip, a converter) goes with it, and may hold the pipe open.
            self._signal(signal.SIGKILL)
            code = process.wait()
            while self._read(output):
                pass
            loop.remove_reader(output)
            process.stdout.close()
            os.close(self._tether)
            if self._grace is not None:
                self._grace.cancel()
            if record is not None:
                record.unlink(missing_ok=True)
        await self._until_group_is_gone(process.pid)
        if code == 0:
            return None
        said = " ".join(line for line in self._tail if line)
        return f"{describe_exit(code)}{f': {said}' if said else ''}"

    def stop(self) -> None:
        """SIGTERM to its group, and SIGKILL after STOP_GRACE_S. Does nothing before `run` and after it."""
        self._signal(signal.SIGTERM)
        if self._grace is None and self._process is not None:
            self._grace = asyncio.get_running_loop().call_later(STOP_GRACE_S, self._signal, signal.SIGKILL)

    def _spawn(self, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        tether_read, self._tether = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*argv, "--tether-fd", str(tether_read)],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(tether_read,),
                start_new_session=True,
            )
        except OSError:
            os.close(self._tether)
            raise
        finally:
            os.close(tether_read)
        return self._process

    async def _until_group_is_gone(self, group: int) -> None:
        """What the process had started has been killed too; a kill takes a moment."""
        for _ in range(GROUP_LOOKS):
            try:
                os.killpg(group, 0)
            except (ProcessLookupError, PermissionError):
                return
            await asyncio.sleep(GROUP_LOOK_INTERVAL_S)

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group, while the process is ours to signal."""
        if self._process is None or self._process.returncode is not None:
            return
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # gone; macOS answers so for a zombie

    def _read(self, output: int) -> bool:
        """Read what is there. False when the pipe has nothing (more) to say."""
        try:
            data = os.read(output, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(output)
            return False
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MAX_LINE_BYTES:
            self._buffer = b""
        for line in lines:
            message = read_line(line)
            if message is not None:
                self._on_line(message)
            else:
                self._tail.append(line.decode(errors="replace").strip()[:TAIL_LINE_CHARS])
        return True
