"""The environment of a worker: what is added, and what of the user's is kept."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlxpool.shared import backend


def test_a_worker_is_told_that_it_is_offline_and_unbuffered() -> None:
    env = backend.worker_environment("none", {"PATH": "/bin", "OMP_NUM_THREADS": "3"})
    assert env == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "3",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def test_openblas_is_preloaded_on_the_cpu_backend_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(backend, "find_openblas", lambda: "/lib/libopenblas.so.0")
    assert backend.worker_environment("cpu", {})["LD_PRELOAD"] == "/lib/libopenblas.so.0"
    assert "LD_PRELOAD" not in backend.worker_environment("cuda", {})
    kept = backend.worker_environment("cpu", {"LD_PRELOAD": "/x/libjemalloc.so"})
    assert kept["LD_PRELOAD"] == "/x/libjemalloc.so:/lib/libopenblas.so.0"
    own = backend.worker_environment("cpu", {"LD_PRELOAD": "/mine/libopenblas.so"})
    assert own["LD_PRELOAD"] == "/mine/libopenblas.so"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "LD_PRELOAD" not in backend.worker_environment("cpu", {})


def test_without_openblas_nothing_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "find_openblas", lambda: None)
    assert "LD_PRELOAD" not in backend.worker_environment("cpu", {})


def test_cuda_libraries_of_the_installed_wheels_come_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("cudnn", "cu13"):
        (tmp_path / "nvidia" / name / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "docs").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    env = backend.worker_environment("cuda", {"LD_LIBRARY_PATH": "/own"})
    assert env["LD_LIBRARY_PATH"] == f"{tmp_path}/nvidia/cu13/lib:{tmp_path}/nvidia/cudnn/lib:/own"


@pytest.mark.parametrize("of", ["cpu", "cuda", "metal"])
def test_the_environment_that_a_worker_passes_on_is_a_worker_s_already(
    of: backend.Backend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(backend, "find_openblas", lambda: "/lib/libopenblas.so.0")
    env = backend.worker_environment(of, {"PATH": "/bin", "LD_LIBRARY_PATH": "/own:/other"})
    assert backend.worker_environment(of, env) == env


@pytest.mark.parametrize(
    ("platform", "machine", "installed", "found"),
    [
        ("darwin", "arm64", {"mlx"}, "metal"),
        ("darwin", "x86_64", {"mlx"}, "none"),
        ("linux", "x86_64", {"mlx", "mlx-cpu"}, "cpu"),
        ("linux", "x86_64", {"mlx", "mlx-cuda-13", "mlx-cpu"}, "cuda"),
        ("linux", "aarch64", {"mlx"}, "none"),
    ],
)
def test_the_backend_is_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, platform: str, machine: str, installed: set[str], found: str
) -> None:
    from importlib import metadata

    def distribution(name: str) -> object:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return object()

    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(backend.platform, "machine", lambda: machine)
    backend.detect.cache_clear()
    try:
        assert backend.detect() == found
    finally:
        backend.detect.cache_clear()


def test_the_loaders_cache_is_read_for_this_architecture_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import subprocess

    ours, other = tmp_path / "libopenblas.so.0", tmp_path / "other.so"
    ours.touch()
    other.touch()
    listing = (
        f"\tlibopenblas.so.0 (libc6) => {other}\n"
        f"\tlibopenblas.so.0 (libc6,x86-64) => {ours}\n"
        f"\tlibblas.so.3 (libc6,x86-64) => {other}\n"
    )
    monkeypatch.setattr(backend, "_OPENBLAS_PLACES", ())
    monkeypatch.setattr(backend.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=listing, stderr="")
    )
    backend.find_openblas.cache_clear()
    try:
        assert backend.find_openblas() == str(ours)
    finally:
        backend.find_openblas.cache_clear()
