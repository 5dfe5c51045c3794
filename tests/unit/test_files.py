"""Replacing a file: whoever reads it finds one that is whole."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import BinaryIO

import pytest

from mlxpool.shared.files import PART_SUFFIX, write_whole


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        file.write(b"w")

    write_whole(path, write, durable=durable)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(b"old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, write)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_the_system_refuses_names_the_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_whole(tmp_path / "kept.json", lambda file: file.write(bytes(8192)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "kept.json")
    assert list(tmp_path.iterdir()) == []


def test_what_is_being_written_is_told_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    names: list[str] = []
    write_whole(path, lambda _: names.extend(one.name for one in tmp_path.iterdir()))
    assert [name.startswith("kept.json") and name.endswith(PART_SUFFIX) for name in names] == [True]
