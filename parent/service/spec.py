"""What the service is: the command, its environment and its promises, whoever supervises it. Pure.

Both managers are told the same: start at login; restart after a failure, not after a stop; don't let a
start that can't succeed burn the machine; let running requests end before killing anything. The command is
made of absolute paths alone, because a manager starts it with another working directory and hardly any
environment. What the installing shell had in its environment and the server reads is written into the
service, except secrets: a service file is readable by every program of the user, and gets into backups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from mlxpool.shared.config import seconds_text

LABEL = "local.mlxpool"
UNIT = "mlxpool.service"

# `up` ends with this on bad settings: no restart can help, so systemd is told not to try. launchd knows
# success and failure only; see THROTTLE_S.
EXIT_BAD_CONFIG = 2
# launchd's shortest time between two starts. A bad config fails after 0.1 s of work, so a start every 30 s
# costs 0.3% of a core and a line of log, and the service is back half a minute after the file is mended.
THROTTLE_S = 30
# After the drain come the last bytes of answers (5 s), ending the workers (3 s each, together) and, at
# worst, giving gigabytes back: the manager's own kill must never come before ours is done.
STOP_MARGIN_S = 30
# Clients, each a connection here and one to a worker's socket; launchd's default is 256.
OPEN_FILES = 8192
# The home holds keys, logs and conversations.
UMASK = 0o077

# Besides MLXPOOL_…: where models of the Hub lie, and which GPU is meant.
_CARRIED = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE")
_PREFIX = "MLXPOOL_"
# Said with --home, which is absolute.
_HOME_VARIABLE = "MLXPOOL_HOME"
_SECRETS = frozenset({"MLXPOOL_SERVER_API_KEYS"})
# Control characters, and the surrogates that Python reads bytes as which are no UTF-8.
_UNWRITABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class ServiceError(Exception):
    """The service can't be installed or asked. One line that says what would work."""


class Spec(msgspec.Struct, frozen=True):
    """One service. argv: absolute program first. stop_timeout_s: from SIGTERM to SIGKILL, whole seconds."""

    argv: tuple[str, ...]
    home: Path
    log: Path
    environment: dict[str, str]
    stop_timeout_s: int


class Installed(msgspec.Struct, frozen=True):
    """What an installed service file says."""

    argv: tuple[str, ...]
    stop_timeout_s: int

    @property
    def home(self) -> Path:
        """The home it serves."""
        return Path(self._must("--home"))

    @property
    def log(self) -> Path:
        """Where it writes what it prints."""
        return Path(self._must("--log-file"))

    @property
    def config(self) -> Path | None:
        """The config file it was told to read; None for the home's own."""
        named = self._after("--config")
        return Path(named) if named is not None else None

    def _after(self, option: str) -> str | None:
        where = self.argv.index(option) + 1 if option in self.argv else len(self.argv)
        return self.argv[where] if where < len(self.argv) else None

    def _must(self, option: str) -> str:
        value = self._after(option)
        if value is None:
            raise ServiceError(
                f"the service file has no {option}; write it anew with `mlxpool service install`"
            )
        return value

    def lack(self, drain_timeout_s: float) -> str | None:
        """Why the service should be installed again; None where the file is still right."""
        if not Path(self.argv[0]).exists():
            return f"its program {self.argv[0]} is gone"
        if self.stop_timeout_s < math.ceil(drain_timeout_s) + STOP_MARGIN_S:
            return (
                f"it is killed {self.stop_timeout_s} s after a stop, "
                f"and drain_timeout is {seconds_text(drain_timeout_s)} now"
            )
        return None


def make_spec(
    program: Sequence[str],
    options: Iterable[str],
    *,
    home: Path,
    environment: Mapping[str, str],
    drain_timeout_s: float,
) -> Spec:
    """The service that runs `program… up --home HOME options… --log-file LOG`.

    options: those of `up`, paths absolute. environment: the installing shell's. Raises ServiceError on a
    secret in it, and on text that no service file can hold.
    """
    log = log_path(home)
    argv = (*program, "up", "--home", str(home), *options, "--log-file", str(log))
    carried = _carried(environment)
    for text in (*argv, *carried.values()):
        if _UNWRITABLE.search(text):
            raise ServiceError(f"no service file can hold {text!r}: a control character, or no UTF-8")
    return Spec(argv, home, log, carried, math.ceil(drain_timeout_s) + STOP_MARGIN_S)


def log_path(home: Path) -> Path:
    """Where the service of a home writes what it prints."""
    return home / "logs" / "parent.log"


def program(executable: str, script_on_path: str | None) -> tuple[str, ...]:
    """How this installation's `mlxpool` is started by absolute path.

    executable: this interpreter. script_on_path: where the shell finds `mlxpool`. A script there that is
    ours is preferred to the one beside the interpreter: a package manager keeps the former where it is and
    moves the latter with every version.
    """
    beside = Path(executable).absolute().parent / "mlxpool"
    if not beside.exists():
        return (str(Path(executable).absolute()), "-m", "mlxpool.parent")
    if script_on_path is not None:
        found = Path(script_on_path).absolute()
        if found.resolve() == beside.resolve():
            return (str(found),)
    return (str(beside),)


def _carried(environment: Mapping[str, str]) -> dict[str, str]:
    secret = next((name for name in sorted(environment) if name in _SECRETS and environment[name]), None)
    if secret is not None:
        raise ServiceError(
            f"{secret} is set, and a secret is not written into a service file; "
            "move the keys to [server] api_keys of config.toml and unset it"
        )
    return {
        name: value
        for name, value in sorted(environment.items())
        if name in _CARRIED or (name.startswith(_PREFIX) and name not in _SECRETS | {_HOME_VARIABLE})
    }
