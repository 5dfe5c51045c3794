"""Which MLX backend this installation has, and the environment its workers need.

Plain `mlx` on Linux has no backend of its own: it comes as a second distribution. So the question is
answered from the installed distributions, without importing MLX (the parent never does). What a backend
needs in the environment must be there before the process starts, because the dynamic loader reads it:
that is why a worker's environment is made here, and not by the worker.
"""

from __future__ import annotations

import functools
import os
import platform
import resource
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

Backend = Literal["metal", "cuda", "cpu", "none"]

# What to say where there is none.
INSTALL_HINT = "install mlxpool[cpu] or, with an NVIDIA GPU, mlxpool[cuda]"

# mlx_lm sets this limit of its process when it is imported, and can't be imported where it may not.
OPEN_FILES = 4096

_CUDA_DISTRIBUTIONS = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")

# Where distributions put OpenBLAS, threaded builds first: Debian's pthread flavour, Fedora's libopenblasp,
# Arch's and Alpine's plain folder, what a user built. {arch} is the machine's, like x86_64.
_OPENBLAS_PLACES = (
    "/usr/lib/{arch}-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib/{arch}-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",
    "/usr/lib/libopenblas.so.3",
    "/usr/local/lib/libopenblas.so.0",
    "/opt/OpenBLAS/lib/libopenblas.so.0",
)
# The loader's cache is asked last, and never waited for longer than this.
_LDCONFIG_TIMEOUT_S = 2.0


@functools.cache
def detect() -> Backend:
    """The backend that `import mlx.core` would find here, "none" where it would fail."""
    from importlib.metadata import PackageNotFoundError, distribution

    def installed(name: str) -> bool:
        try:
            distribution(name)
        except PackageNotFoundError:
            return False
        return True

    if sys.platform == "darwin":
        return "metal" if platform.machine() == "arm64" and installed("mlx") else "none"
    if any(installed(name) for name in _CUDA_DISTRIBUTIONS):
        return "cuda"
    return "cpu" if installed("mlx-cpu") else "none"


def worker_environment(backend: Backend, base_env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that uses MLX on `backend`: `base_env` (the process's own) and more.

    An LD_PRELOAD or LD_LIBRARY_PATH that is already there is kept and added to, and a worker's environment is
    one already; thread counts are the user's business. A worker never downloads anything: the Hub libraries
    are told that they are offline.
    """
    env = dict(os.environ if base_env is None else base_env)
    env["PYTHONUNBUFFERED"] = "1"
    # The worker encodes on threads of its own; the library's fork warning and its pool are in the way.
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["HF_HUB_OFFLINE"] = "1"
    env["TRANSFORMERS_OFFLINE"] = "1"
    if backend == "cpu" and sys.platform == "linux":
        preloaded = env.get("LD_PRELOAD", "")
        library = None if "openblas" in preloaded else find_openblas()
        if library is not None:
            env["LD_PRELOAD"] = f"{preloaded}:{library}" if preloaded else library
    if backend == "cuda":
        listed = list(filter(None, env.get("LD_LIBRARY_PATH", "").split(":")))
        lacking = [folder for folder in nvidia_library_folders() if folder not in listed]
        if lacking:
            env["LD_LIBRARY_PATH"] = ":".join([*lacking, *listed])
    return env


@functools.cache
def find_openblas() -> str | None:
    """Path of an OpenBLAS to preload on Linux, None where there is none.

    The CPU wheel of MLX carries the reference BLAS, 20 to 60 times slower than OpenBLAS.
    """
    arch = platform.machine()
    for place in _OPENBLAS_PLACES:
        path = place.format(arch=arch)
        if os.path.exists(path):
            return path
    return next(_loader_cache_openblas(), None)


def _loader_cache_openblas() -> Iterator[str]:
    """Paths the dynamic loader's cache has for OpenBLAS of this architecture."""
    import subprocess

    command = ["/sbin/ldconfig", "-p"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=_LDCONFIG_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return
    # Lines read `libopenblas.so.0 (libc6,x86-64) => /path`; other architectures lack our name in the parens.
    ours = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(platform.machine(), "libc6")
    for line in listed.splitlines():
        name, _, path = line.strip().partition(" => ")
        if name.startswith("libopenblas") and ours in name and os.path.exists(path):
            yield path


def nvidia_library_folders() -> list[str]:
    """The lib folders of the installed nvidia wheels, which the CUDA backend links against."""
    found: list[str] = []
    for entry in sys.path:
        root = Path(entry or ".") / "nvidia"
        found += [str(folder) for folder in sorted(root.glob("*/lib")) if str(folder) not in found]
    return found


def open_files_lack() -> str | None:
    """Why no worker can start under this process's limit of open files, None where one can.

    Raises the limit of this process where that is allowed, as mlx_lm would.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        return None
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, OPEN_FILES))
    except (ValueError, OSError):
        return (
            f"the limit of open files is {most}, and mlx-lm needs {OPEN_FILES}; "
            f"start the server where `ulimit -Hn` says {OPEN_FILES} or more"
        )
    return None
