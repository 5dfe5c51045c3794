"""launchd, asked through launchctl, in the domain of the user's graphical session.

launchctl's commands return before what they asked for has happened: a `bootstrap` right after a `bootout`
fails while the old server still drains. So ends are waited for here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from . import launchd
from .manager import Said, Status, call, must
from .spec import LABEL, Installed, ServiceError, Spec

_POLL_S = 0.1
# launchd ends a service by itself at ExitTimeOut; a moment more is what hearing of it may take.
_GONE_GRACE_S = 5.0


class Launchctl:
    """The agent of this user."""

    name = "launchd"

    def __init__(self, user_home: Path) -> None:
        self.root = user_home / "Library"
        self.file = launchd.file_path(user_home)
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{LABEL}"

    def render(self, spec: Spec) -> bytes:
        return launchd.render(spec)

    def read(self, content: bytes) -> Installed:
        return launchd.read(content)

    def start(self, stop_timeout_s: float) -> None:
        self.stop(stop_timeout_s)
        # `launchctl disable` of long ago would make bootstrap fail without saying so.
        must(["launchctl", "enable", self._target])
        said = call(["launchctl", "bootstrap", self._domain, str(self.file)])
        if said.code != 0:
            raise ServiceError(
                f"launchd did not take the service: {said.words}; an agent needs a user who is logged in at "
                "the screen (for a Mac without one, turn automatic login on)"
            )

    def restart(self, stop_timeout_s: float) -> None:
        if self.status().pid is not None:
            # `kickstart -k` would not let requests end. A stop that was asked for exits with 0, so launchd
            # does not start it again by itself.
            must(["launchctl", "kill", "SIGTERM", self._target])
            self._wait(lambda: self.status().pid is None, stop_timeout_s)
        must(["launchctl", "kickstart", self._target])

    def stop(self, stop_timeout_s: float) -> None:
        if self._print().code != 0:
            return
        said = call(["launchctl", "bootout", self._target])
        try:
            self._wait(lambda: self._print().code != 0, stop_timeout_s)
        except ServiceError as problem:
            raise ServiceError(f"{problem}; launchctl said: {said.words}") from None

    def forgotten(self) -> None:
        """launchd forgot it when it was booted out."""

    def status(self) -> Status:
        if not self.file.exists():
            return Status("absent")
        try:
            said = self._print()
        except ServiceError as problem:
            return Status("unknown", detail=str(problem))
        if said.code != 0:
            return Status("stopped", detail="launchd has not loaded it")
        return read_print(said.out)

    def _print(self) -> Said:
        return call(["launchctl", "print", self._target])

    def _wait(self, done: Callable[[], bool], stop_timeout_s: float) -> None:
        deadline = time.monotonic() + stop_timeout_s + _GONE_GRACE_S
        while not done():
            if time.monotonic() > deadline:
                raise ServiceError(f"the service did not end within {stop_timeout_s:.0f} s")
            time.sleep(_POLL_S)


def read_print(text: str) -> Status:
    """The status in the output of `launchctl print`, whose lines read `name = value`. Pure.

    Apple promises nothing about its form; what is not found is not told.
    """
    told = dict(re.findall(r"^\t?([a-z ]+) = (.+)$", text, re.M))
    pid = _number(told.get("pid"))
    exit_code = _number(told.get("last exit code"))
    signal = told.get("last terminating signal", "")
    if pid is not None:
        return Status("running", pid)
    if exit_code or signal:
        return Status("failed", None, exit_code, f"ended by signal {signal}" if signal else "")
    return Status("stopped", None, exit_code)


def _number(text: str | None) -> int | None:
    found = re.match(r"-?\d+", text or "")
    return int(found[0]) if found else None
