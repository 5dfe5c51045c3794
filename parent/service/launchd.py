"""The service as a LaunchAgent. Pure.

launchd knows success and failure, not exit codes: KeepAlive with SuccessfulExit false restarts a server that
crashed and one that refused its config alike. What keeps the latter from burning the machine is
ThrottleInterval, counted from start to start: a server that ran for longer is restarted at once, one that
fails at once twice a minute.
"""

from __future__ import annotations

import plistlib
import xml.parsers.expat
from pathlib import Path

from .spec import LABEL, OPEN_FILES, THROTTLE_S, UMASK, Installed, ServiceError, Spec


def file_path(user_home: Path) -> Path:
    """Where the user's agents lie."""
    return user_home / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def render(spec: Spec) -> bytes:
    """The property list."""
    log = str(spec.log)
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(spec.argv),
            "EnvironmentVariables": spec.environment,
            "WorkingDirectory": str(spec.home),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": spec.stop_timeout_s,
            # Anything less is throttled while no window is in front: a request would crawl.
            "ProcessType": "Interactive",
            # Up to the moment that --log-file takes over: an interpreter that doesn't start is told here.
            "StandardOutPath": log,
            "StandardErrorPath": log,
            "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
            "Umask": UMASK,
        },
        sort_keys=False,
    )


def read(content: bytes) -> Installed:
    """What an installed property list says. Raises ServiceError on one that is not ours."""
    try:
        told = plistlib.loads(content)
        return Installed(tuple(map(str, told["ProgramArguments"])), int(told["ExitTimeOut"]))
    except (plistlib.InvalidFileException, xml.parsers.expat.ExpatError, KeyError, TypeError, ValueError):
        raise ServiceError(
            "the service file is not as mlxpool writes it; write it anew with `mlxpool service install`"
        ) from None
