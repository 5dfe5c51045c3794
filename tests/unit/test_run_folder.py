"""Where sockets lie, and that one home has one parent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from mlxpool.parent.run_folder import (
    MAX_SOCKET_PATH_BYTES,
    Address,
    RunFolderError,
    acquire_lock,
    make_run_folder,
    read_address,
    write_address,
)


def test_sockets_lie_in_the_home_in_a_folder_of_the_users_own(tmp_path: Path):
    folder = make_run_folder(tmp_path)
    assert folder == tmp_path / "run"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(make_run_folder(tmp_path).stat().st_mode) == 0o700


def test_a_home_with_a_long_path_gets_a_short_private_folder_of_its_own(tmp_path: Path):
    homes = [tmp_path / ("x" * 100) / name for name in ("a", "b")]
    for home in homes:
        home.mkdir(parents=True)
    first, second = (make_run_folder(home) for home in homes)
    assert first != second
    assert len(os.fsencode(first / "99999999.sock")) <= MAX_SOCKET_PATH_BYTES
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700
    assert make_run_folder(homes[0]) == first
    first.rmdir()
    second.rmdir()


def test_a_link_where_the_run_folder_is_due_is_refused(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="no folder of this user"):
        make_run_folder(tmp_path)


def test_a_home_is_locked_once_and_says_by_whom(tmp_path: Path):
    write_address(tmp_path, Address(4711, 0.0, "127.0.0.1", 8420))
    with acquire_lock(tmp_path), pytest.raises(RunFolderError, match=r"pid 4711, http://127.0.0.1:8420"):
        acquire_lock(tmp_path)
    with acquire_lock(tmp_path):
        pass


def test_a_home_that_can_not_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="--home"):
        acquire_lock(tmp_path / "file")


def test_a_broken_address_file_is_no_address(tmp_path: Path):
    assert read_address(tmp_path) is None
    (tmp_path / "up.json").write_text("{")
    assert read_address(tmp_path) is None
