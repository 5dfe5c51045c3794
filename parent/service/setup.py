"""Installing and uninstalling: the service file, and the manager told of it. All or nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from .launchctl import Launchctl
from .manager import Manager
from .spec import Installed, ServiceError, Spec
from .systemctl import Systemctl

Kind = Literal["launchd", "systemd"]


def manager(kind: Kind | None, environment: Mapping[str, str]) -> Manager:
    """The manager of that kind, None for this system's own."""
    if kind is None:
        kind = "launchd" if sys.platform == "darwin" else "systemd"
    user_home = Path(environment.get("HOME") or Path.home())
    if kind == "launchd":
        return Launchctl(user_home)
    return Systemctl(Path(environment.get("XDG_CONFIG_HOME") or user_home / ".config"))


def install(service: Manager, spec: Spec) -> None:
    """Write the file and start the service. Raises ServiceError, and then nothing has changed."""
    content = service.render(spec)
    before = service.file.read_bytes() if service.file.exists() else None
    made = [*_make_folder(service.file.parent), *_make_folder(spec.log.parent)]
    try:
        _write(service.file, content)
        service.start(spec.stop_timeout_s)
    except (ServiceError, OSError) as problem:
        _take_back(service, before, made, spec.stop_timeout_s)
        raise ServiceError(f"nothing was installed: {problem}") from None


def _take_back(service: Manager, before: bytes | None, made: list[Path], stop_timeout_s: float) -> None:
    """Undo what an install got done; what can't be undone is less than what went wrong before it."""
    with contextlib.suppress(ServiceError, OSError):
        if before is not None:
            _write(service.file, before)
            service.start(stop_timeout_s)
    if before is None:
        with contextlib.suppress(ServiceError):
            service.stop(stop_timeout_s)
        with contextlib.suppress(OSError):
            service.file.unlink(missing_ok=True)
        with contextlib.suppress(ServiceError):
            service.forgotten()
        _remove_empty(made)


def installed(service: Manager) -> Installed | None:
    """What the installed file says, None where there is none. Raises ServiceError."""
    try:
        content = service.file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise ServiceError(f"{service.file} can't be read: {problem}") from None
    return service.read(content)


def uninstall(service: Manager) -> bool:
    """Stop the service and remove its file. Whether there was one. Raises ServiceError, nothing removed.

    Models, settings and logs stay; folders that installing made and nothing came to lie in go.
    """
    found = installed(service)
    if found is None:
        return False
    try:
        service.stop(found.stop_timeout_s)
    except ServiceError as problem:
        raise ServiceError(f"{problem}; its file is {service.file}") from None
    service.file.unlink()
    service.forgotten()
    above = [path for path in service.file.parents if path.is_relative_to(service.root)]
    _remove_empty([*reversed(above), found.home, found.log.parent])
    return True


def log_tail(log: Path, lines: int) -> list[str]:
    """The last lines of the service's log that hold anything."""
    try:
        with log.open("rb") as file:
            # Lines of a log are short; this many bytes hold enough of them.
            file.seek(max(0, os.fstat(file.fileno()).st_size - 400 * lines))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]


def find_script() -> str | None:
    """Where the shell finds `mlxpool`."""
    return shutil.which("mlxpool")


def _make_folder(folder: Path) -> list[Path]:
    """Make it; the folders that were not there, outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    try:
        for path in missing:
            path.mkdir(mode=0o700, exist_ok=True)
    except OSError as problem:
        raise ServiceError(f"{folder} can't be made: {problem}") from None
    return missing


def _remove_empty(folders: list[Path]) -> None:
    """Remove those of the folders that are empty, innermost (last) first."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            pass  # not empty, or not there


def _write(path: Path, content: bytes) -> None:
    """The whole file or the old one: a manager may read it at any moment."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
