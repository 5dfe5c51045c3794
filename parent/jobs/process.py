"""One job's process: its lines, its signals, its end.

It runs in a session (so a process group) of its own with a tether (shared/tether.py): a parent that is killed
takes it and all it has started along. stdout and stderr are one pipe; lines of the job protocol
(`shared/job_lines.py`) are handed on, others as `Log`; the last of those are what a crash is explained with.
As with workers, the exit is learnt without reaping, so its pid can't be another's while a signal is on its
way.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from mlxpool.parent.pool import reaper
from mlxpool.parent.pool.process import READ_BYTES, describe_exit, wait_without_reaping
from mlxpool.shared.job_lines import Line, Log, read_line

# Between SIGTERM and SIGKILL: a job's work is staged, so it has nothing to save.
STOP_GRACE_S = 3.0
# A killed group is gone in a moment, unless one of it hangs in the kernel.
GROUP_LOOK_INTERVAL_S = 0.01
# So many quick looks; after them it is looked, more slowly, whether only zombies are left: where nothing
# reaps orphans they stay for ever.
GROUP_QUICK_LOOKS = 20
GROUP_SLOW_LOOK_INTERVAL_S = 0.25
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
        """Until it and its group are gone. None where it exited 0, else how it ended.

        Raises OSError or ValueError where it can't be started.
        """
        process = self._spawn(argv, env)
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        try:
            record = reaper.record(run_folder, process.pid)
        except OSError:
            record = None  # a full disk; its tether ends it all the same
        output = process.stdout.fileno()
        os.set_blocking(output, False)
        loop.add_reader(output, self._read, output)
        try:
            await _ended(process.pid)
        finally:
            # What it started itself (pip, a converter) goes with it, and may hold the pipe open.
            self._signal(signal.SIGKILL)
            code = process.wait()
            while self._read(output):
                pass
            self._take(self._buffer)
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
        except (OSError, ValueError):
            os.close(self._tether)
            raise
        finally:
            os.close(tether_read)
        return self._process

    async def _until_group_is_gone(self, group: int) -> None:
        """What the process had started has been killed too; a kill takes a moment."""
        looks = 0
        while True:
            try:
                os.killpg(group, 0)
            except (ProcessLookupError, PermissionError):
                return
            looks += 1
            if looks < GROUP_QUICK_LOOKS:
                await asyncio.sleep(GROUP_LOOK_INTERVAL_S)
            elif await asyncio.to_thread(_only_zombies, group):
                return
            else:
                await asyncio.sleep(GROUP_SLOW_LOOK_INTERVAL_S)

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
            self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        message = read_line(line)
        if message is None:
            # What a progress bar has drawn last stands behind its last return.
            text = line.rstrip().rpartition(b"\r")[2].decode(errors="replace").rstrip()
            if not text:
                return
            self._tail.append(text.strip()[:TAIL_LINE_CHARS])
            message = Log(text)
        self._on_line(message)


async def _ended(pid: int) -> None:
    """Returns when the child has. On a thread of its own: the loop's are for work that ends soon."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wait() -> None:
        wait_without_reaping(pid)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, daemon=True, name="job").start()
    await ended.wait()


def _only_zombies(group: int) -> bool:
    """Whether nothing of a process group runs any more."""
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except (psutil.Error, OSError):
            continue
    return True
