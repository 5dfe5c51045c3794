"""systemd's user manager, asked through systemctl."""

from __future__ import annotations

from pathlib import Path

from . import systemd
from .manager import CALL_TIMEOUT_S, Status, call, must
from .spec import UNIT, Installed, ServiceError, Spec

_SYSTEMCTL = ("systemctl", "--user")
_PROPERTIES = "ActiveState,MainPID,ExecMainStatus,ExecMainCode,NRestarts,Result"
# siginfo's CLD_EXITED: only then is ExecMainStatus an exit code, else it is a signal.
_EXITED = "1"


class Systemctl:
    """The unit of this user."""

    name = "systemd"

    def __init__(self, config_home: Path) -> None:
        self.root = config_home
        self.file = systemd.file_path(config_home)

    def render(self, spec: Spec) -> bytes:
        return systemd.render(spec)

    def read(self, content: bytes) -> Installed:
        return systemd.read(content)

    def start(self, stop_timeout_s: float) -> None:
        must([*_SYSTEMCTL, "daemon-reload"])
        must([*_SYSTEMCTL, "enable", UNIT])
        self.restart(stop_timeout_s)

    def restart(self, stop_timeout_s: float) -> None:
        # A unit that used up its restarts is started only once its count is forgotten.
        call([*_SYSTEMCTL, "reset-failed", UNIT])
        must([*_SYSTEMCTL, "restart", UNIT], stop_timeout_s + CALL_TIMEOUT_S)

    def stop(self, stop_timeout_s: float) -> None:
        must([*_SYSTEMCTL, "disable", "--now", UNIT], stop_timeout_s + CALL_TIMEOUT_S)

    def forgotten(self) -> None:
        must([*_SYSTEMCTL, "daemon-reload"])
        call([*_SYSTEMCTL, "reset-failed", UNIT])

    def status(self) -> Status:
        if not self.file.exists():
            return Status("absent")
        try:
            said = must([*_SYSTEMCTL, "show", UNIT, f"--property={_PROPERTIES}"])
        except ServiceError as problem:
            return Status("unknown", detail=str(problem))
        return read_show(said.out)


def read_show(text: str) -> Status:
    """The status in the output of `systemctl show`: one `Property=value` a line. Pure."""
    told = dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)
    active = told.get("ActiveState", "")
    pid = int(told.get("MainPID") or 0) or None
    ended = told.get("ExecMainCode", "0")
    status = int(told.get("ExecMainStatus") or 0)
    exit_code = status if ended == _EXITED else None
    signal = f"ended by signal {status}" if ended not in ("0", _EXITED) and status else ""
    if active in ("active", "reloading", "deactivating") and pid is not None:
        return Status("running", pid, detail="" if active == "active" else active)
    if active == "failed":
        why = {"start-limit-hit": "failed too often to be tried again"}.get(told.get("Result", ""), signal)
        return Status("failed", None, exit_code, why)
    if active == "activating":
        # Between two tries, or just being started.
        return Status("failed" if exit_code or signal else "stopped", pid, exit_code, signal or "starting")
    if active == "inactive":
        return Status("stopped", None, exit_code, signal)
    return Status("unknown", detail=f"systemd says {active!r}")
