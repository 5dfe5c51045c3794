"""The service as a systemd user unit. Pure.

Sandboxing is what a user's manager can give without namespaces and what leaves the GPU alone: PrivateDevices
would hide it, MemoryDenyWriteExecute stops the driver's compiler, PrivateTmp needs rights a user may lack.
"""

from __future__ import annotations

import re
from pathlib import Path

from .spec import EXIT_BAD_CONFIG, OPEN_FILES, UMASK, UNIT, Installed, ServiceError, Spec

# First restart after this; a port that is taken or a crash at start gets 20 tries, then it is left as failed.
_RESTART_S = 5
_RESTARTS = 20
_RESTARTS_WITHIN_S = 600
# systemd refuses a program whose path has one of these, however it is quoted.
_NOT_IN_PROGRAM = "'\"\\"

_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"')


def file_path(config_home: Path) -> Path:
    """Where the user's units lie. config_home: XDG_CONFIG_HOME, else ~/.config."""
    return config_home / "systemd" / "user" / UNIT


def render(spec: Spec) -> bytes:
    """The unit file. Raises ServiceError on a program that no unit can name."""
    if any(mark in spec.argv[0] for mark in _NOT_IN_PROGRAM):
        raise ServiceError(
            f"systemd runs no program with a quote or a backslash in its path: {spec.argv[0]}; "
            "install mlxpool in another folder"
        )
    environment = "".join(
        f"Environment={_quoted(f'{name}={value}')}\n" for name, value in spec.environment.items()
    )
    # The colon: no argument is searched for variables.
    command = ":" + " ".join(map(_quoted, spec.argv))
    return f"""\
[Unit]
Description=mlxpool, language models behind one port
StartLimitIntervalSec={_RESTARTS_WITHIN_S}
StartLimitBurst={_RESTARTS}

[Service]
Type=exec
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
{environment}WorkingDirectory=-{_specifiers(str(spec.home))}
UMask={UMASK:04o}
LimitNOFILE={OPEN_FILES}

# A failure is restarted, a stop is not, and bad settings (exit code {EXIT_BAD_CONFIG}) wait for a person.
Restart=on-failure
RestartSec={_RESTART_S}
RestartPreventExitStatus={EXIT_BAD_CONFIG}

# SIGTERM goes to the server alone, which drains its workers; what is left at the end is killed.
KillMode=mixed
TimeoutStopSec={spec.stop_timeout_s}
# A worker that the kernel ends for memory takes nothing else with it.
OOMPolicy=continue

NoNewPrivileges=yes
LockPersonality=yes
RestrictNamespaces=yes
RestrictSUIDSGID=yes

[Install]
WantedBy=default.target
""".encode()


def read(content: bytes) -> Installed:
    """What an installed unit says. Raises ServiceError on one that is not ours."""
    text = content.decode(errors="replace")
    command = re.search(r"^ExecStart=:(.+)$", text, re.M)
    timeout = re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)
    words = _WORD.findall(command[1]) if command else []
    if not words or not timeout:
        raise ServiceError(
            "the service file is not as mlxpool writes it; write it anew with `mlxpool service install`"
        )
    plain = (re.sub(r"\\(.)", r"\1", word).replace("%%", "%") for word in words)
    return Installed(tuple(plain), int(timeout[1]))


def _quoted(text: str) -> str:
    """One word of a unit file."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_specifiers(escaped)}"'


def _specifiers(text: str) -> str:
    """Text in which % means itself."""
    return text.replace("%", "%%")
