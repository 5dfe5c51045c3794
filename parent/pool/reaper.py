"""Ending what a killed predecessor left.

A worker ends by itself when its tether closes. One that was stopped (SIGSTOP) or hangs before its tether is
watched can't; so every worker is recorded with its pid and its birth, and the next parent kills those that
still match. A pid alone proves nothing. A birth is what the kernel itself counts, not a time of day: those
move when the clock is set.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

# SIGKILL needs no cooperation, only the kernel's time to give gigabytes back.
KILL_WAIT_S = 10.0


class WorkerRecord(msgspec.Struct, frozen=True):
    """One file of the run folder: a process that must not outlive the parent. born: see `birth`."""

    pid: int
    born: str


def record(folder: Path, pid: int) -> Path | None:
    """Remember a worker; the path to remove when it is gone. None if it is gone already. Raises OSError."""
    born = birth(pid)
    if born is None:
        return None
    path = folder / f"{pid}.worker"
    path.write_bytes(msgspec.json.encode(WorkerRecord(pid, born)))
    return path


def birth(pid: int) -> str | None:
    """What tells this process from any other that ever had its pid; None where there is none but a zombie."""
    if sys.platform == "darwin":
        import psutil

        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.6f}"
        except psutil.Error:
            return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The name may hold spaces and brackets; after its last bracket come the state and, as the twentieth field
    # from there, the ticks between boot and birth.
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else f"{boot} {fields[19]}"


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
    return birth(old.pid) == old.born


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        os.kill(pid, signal.SIGKILL)
