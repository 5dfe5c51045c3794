"""Where things lie in the home folder, and how a running server is found there.

`up` writes `up.json` once it listens and removes it when it ends; a file left by a killed server names a
process that is gone or another one, so its start time is compared before anybody believes it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

# A process's start time is read from the same clock both times; half a tick is all that may differ.
_START_TOLERANCE_S = 1.0


class Up(msgspec.Struct, frozen=True):
    """A server that listens. started: the process's start time as the system tells it, unix seconds."""

    pid: int
    started: float
    host: str
    port: int

    @property
    def address(self) -> str:
        """The host to connect to, with wildcard addresses turned into loopback ones."""
        wildcards = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
        return wildcards.get(self.host, self.host)

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


def up_file(home: Path) -> Path:
    return home / "up.json"


def logs_folder(home: Path) -> Path:
    return home / "logs"


def worker_log(home: Path, model: str) -> Path:
    """The log of one model's workers. A model's name may hold a slash, a file's may not."""
    return logs_folder(home) / f"{model.replace('/', '--')}.log"


def write_up(home: Path, up: Up) -> None:
    """Say that this server listens. Atomic: a reader sees the old file or the new one."""
    path = up_file(home)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_bytes(msgspec.json.encode(up) + b"\n")
    os.replace(part, path)


def remove_up(home: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        up_file(home).unlink()


def read_up(home: Path) -> Up | None:
    """What the file says, None where there is none or it says nothing sensible."""
    try:
        return msgspec.json.decode(up_file(home).read_bytes(), type=Up)
    except (OSError, msgspec.DecodeError):
        return None


def is_process(up: Up) -> bool:
    """Whether the process that wrote the file is still the one with that pid."""
    import psutil

    try:
        return abs(psutil.Process(up.pid).create_time() - up.started) <= _START_TOLERANCE_S
    except psutil.Error:
        return False
