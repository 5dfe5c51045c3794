"""What `mlxpool doctor` looks at: facts about this machine and this installation, gathered without judging.

Each look is bounded in time, and one that fails is a fact too. Nothing is changed: the disk's rate is
measured with one file that is removed again, and only where the home is there already.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import resource
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

from mlxpool.parent import hints
from mlxpool.parent.doctor import Facts, ModelFact, Port, Rate, Running
from mlxpool.parent.library import Library
from mlxpool.parent.service import setup
from mlxpool.parent.service.manager import Manager
from mlxpool.parent.service.spec import ServiceError
from mlxpool.shared import backend
from mlxpool.shared.config import Settings
from mlxpool.shared.probe import ProbeReport

_DISTRIBUTIONS = ("mlx", "mlx-metal", "mlx-cuda-13", "mlx-cpu", "mlx-lm")
# Importing MLX takes 0.1 s from a warm disk; a GPU's first context takes seconds.
_PROBE_TIMEOUT_S = 60.0
# Large enough that a disk's own cache does not hold it all, and less than two seconds of a slow one.
_DISK_BYTES = 128 * 2**20
_BLOCK_BYTES = 4 * 2**20
_DISK_LIMIT_S = 2.0
# A measurement is not worth a full disk.
_DISK_LEAVE_BYTES = 2 * 2**30
_F_NOCACHE = 48  # <fcntl.h> of macOS: reads of this descriptor come from the disk


def look(settings: Settings, running: Running | None) -> Facts:
    """All facts; takes about three seconds."""
    home = settings.home
    kind = backend.detect()
    probe, probe_fault = _probe(kind)
    port_state, port_fault = _port(settings, running)
    library = Library(settings)
    budget = library.budget()
    described = [
        (model.name, library.describe(model, kind, budget.models_bytes)) for model in library.models()
    ]
    memory_now = psutil.virtual_memory()
    service = setup.manager(None, os.environ)
    return Facts(
        python=platform.python_version(),
        system=platform.system(),
        chip=platform.machine(),
        versions=_versions(_DISTRIBUTIONS),
        backend=kind,
        openblas=backend.find_openblas() if kind == "cpu" and sys.platform == "linux" else None,
        probe=probe,
        probe_fault=probe_fault,
        home=home,
        home_option=hints.home_option(home),
        home_mode=_mode(home),
        home_writable=os.access(_nearest(home), os.W_OK | os.X_OK),
        config=settings.config_path,
        config_mode=_mode(settings.config_path) if settings.config_path is not None else None,
        has_keys=bool(settings.server.api_keys),
        disk_free=shutil.disk_usage(_nearest(home)).free,
        disk_rate=_disk_rate(home),
        memory_total=memory_now.total,
        memory_available=memory_now.available,
        budget=budget,
        running=running,
        host=settings.server.host,
        port=settings.server.port,
        port_state=port_state,
        port_fault=port_fault,
        manager=service.name,
        service=service.status(),
        service_lack=_service_lack(service, settings),
        models=[ModelFact(name, entry.fault, entry.plan) for name, entry in described],
        shadowed=[path for paths in library.shadowed().values() for path in paths],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        open_files_lack=backend.open_files_lack(),
    )


def _versions(names: Sequence[str]) -> dict[str, str]:
    """The installed ones of these distributions."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _probe(kind: backend.Backend) -> tuple[ProbeReport | None, str]:
    """What MLX says in a process with a worker's environment, or why it says nothing."""
    if kind == "none":
        return None, ""
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "mlxpool.worker.probe"],
            env=backend.worker_environment(kind),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
        if ended.returncode == 0:
            return msgspec.json.decode(ended.stdout, type=ProbeReport), ""
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_PROBE_TIMEOUT_S:.0f} s"
    except (OSError, msgspec.MsgspecError) as problem:
        return None, str(problem)
    said = ended.stderr.decode(errors="replace").strip().splitlines()
    return None, said[-1] if said else f"the probe ended with {ended.returncode}"


def _nearest(path: Path) -> Path:
    """The path itself or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _mode(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return None


def _disk_rate(home: Path) -> Rate | None:
    """None where there is no home to write into, or no room to spare."""
    try:
        if shutil.disk_usage(home).free < _DISK_LEAVE_BYTES + _DISK_BYTES:
            return None
        with tempfile.NamedTemporaryFile(dir=home, prefix=".doctor-", buffering=0) as file:
            return _measure(file.fileno())
    except OSError:
        return None


def _measure(descriptor: int) -> Rate:
    # Random: a disk or file system that compresses would be measured writing nothing.
    block = os.urandom(_BLOCK_BYTES)
    begun = time.perf_counter()
    size = 0
    while size < _DISK_BYTES and time.perf_counter() - begun < _DISK_LIMIT_S:
        size += os.write(descriptor, block)
    os.fsync(descriptor)
    written_s = time.perf_counter() - begun
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, _F_NOCACHE, 1)
    else:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.perf_counter()
    read = 0
    while time.perf_counter() - begun < _DISK_LIMIT_S:
        part = len(os.pread(descriptor, _BLOCK_BYTES, read))
        if part == 0:
            break
        read += part
    return Rate(size / written_s, read / (time.perf_counter() - begun))


def _port(settings: Settings, running: Running | None) -> tuple[Port, str]:
    """Whether a server could listen where the settings say."""
    host, port = settings.server.host, settings.server.port
    if running is not None and running.url.endswith(f":{port}"):
        return "ours", ""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as problem:
        state: Port = "taken" if problem.errno == errno.EADDRINUSE else "unusable"
        return state, problem.strerror or str(problem)
    return "free", ""


def _service_lack(service: Manager, settings: Settings) -> str | None:
    """Why the installed service should be installed again; None where it should not, or there is none."""
    try:
        found = setup.installed(service)
        return None if found is None else found.lack(settings.pool.drain_timeout)
    except ServiceError as problem:
        return str(problem)
