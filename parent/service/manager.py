"""What a service manager can be asked, and how its program is run.

A manager's program is the one source of what runs: nothing is remembered here. Each call is a short process;
the only long ones are stops, which last as long as the server's drain.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from .spec import Installed, ServiceError, Spec

State = Literal["absent", "running", "stopped", "failed", "unknown"]

# A manager answers within milliseconds; one that takes this long is not well.
CALL_TIMEOUT_S = 20.0


class Status(msgspec.Struct, frozen=True):
    """What the manager says of the service.

    absent: no service file. stopped: ended as it should, or never started. failed: ended otherwise, whether
    or not it will be started again. unknown: the manager could not be asked; detail says why.
    """

    state: State
    pid: int | None = None
    exit_code: int | None = None
    detail: str = ""


class Manager(Protocol):
    """One service manager. Methods raise ServiceError in the manager's own words.

    file: where its service file lies. root: the folder above it that installing may have had to make.
    """

    name: str
    root: Path
    file: Path

    def render(self, spec: Spec) -> bytes:
        """The service file."""

    def read(self, content: bytes) -> Installed:
        """What a service file says."""

    def start(self, stop_timeout_s: float) -> None:
        """Take the file as it lies there and (re)start the service, now and at every login.

        stop_timeout_s: how long a service that runs already may take to end.
        """

    def restart(self, stop_timeout_s: float) -> None:
        """End the running service, its requests first, and start it again."""

    def stop(self, stop_timeout_s: float) -> None:
        """End it and forget it: no start at the next login. Nothing to stop is no error."""

    def forgotten(self) -> None:
        """The file is gone."""

    def status(self) -> Status:
        """Never raises."""


class Said(msgspec.Struct, frozen=True):
    """How a program ended."""

    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """What it said, on one line."""
        return " ".join((self.err.strip() or self.out.strip() or f"exit code {self.code}").split())


def call(argv: Sequence[str], timeout_s: float = CALL_TIMEOUT_S) -> Said:
    """Run the manager's program. Raises ServiceError where it is not here or does not end."""
    if shutil.which(argv[0]) is None:
        raise ServiceError(
            f"{argv[0]} is not on this machine; `mlxpool service print` shows what another supervisor needs"
        )
    try:
        ended = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{' '.join(argv)}` did not end within {timeout_s:.0f} s") from None
    return Said(ended.returncode, ended.stdout, ended.stderr)


def must(argv: Sequence[str], timeout_s: float = CALL_TIMEOUT_S) -> Said:
    """`call`, and an exit code other than 0 is a ServiceError."""
    said = call(argv, timeout_s)
    if said.code != 0:
        raise ServiceError(f"`{' '.join(argv)}` failed: {said.words}")
    return said
