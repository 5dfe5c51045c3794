"""Ending what a killed predecessor left.

A worker ends by itself when its tether closes. One that was stopped (SIGSTOP) or hangs before its tether is
watched can't; so every worker is recorded with its pid and start time, and the next parent kills those that
still match. A pid alone proves nothing: the start time must agree too.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec

# Start times come from the kernel in clock ticks (10 ms); two readings of one process agree better than this.
START_TIME_TOLERANCE_S = 0.05
# SIGKILL needs no cooperation, only the kernel's time to give gigabytes back.
KILL_WAIT_S = 10.0


class WorkerRecord(msgspec.Struct, frozen=True):
    """One line of the run folder: a process that must not outlive the parent."""

    pid: int
    started: float


def record(folder: Path, pid: int) -> Path | None:
    """Remember a worker; the path to `forget`. None if it is gone already."""
    started = start_time(pid)
    if started is None:
        return None
    path = folder / f"{pid}.worker"
    path.write_bytes(msgspec.json.encode(WorkerRecord(pid, started)))
    return path


def start_time(pid: int) -> float | None:
    """When the process began, seconds since the epoch; None if there is none."""
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def reap(folder: Path) -> list[int]:
    """Kill every recorded worker that still runs, with its process group. The pids that were killed."""
    killed = []
    for path in sorted(folder.glob("*.worker")):
        try:
            old = msgspec.json.decode(path.read_bytes(), type=WorkerRecord)
        except (OSError, msgspec.MsgspecError):
            path.unlink(missing_ok=True)
            continue
        if _is_running(old):
            _kill_group(old.pid)
            deadline = time.monotonic() + KILL_WAIT_S
            while _is_running(old) and time.monotonic() < deadline:
                time.sleep(0.01)
            killed.append(old.pid)
        path.unlink(missing_ok=True)
    for socket in folder.glob("*.sock"):
        socket.unlink(missing_ok=True)
    return killed


def _is_running(old: WorkerRecord) -> bool:
    import psutil

    try:
        process = psutil.Process(old.pid)
        same = abs(process.create_time() - old.started) < START_TIME_TOLERANCE_S
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        os.kill(pid, signal.SIGKILL)
