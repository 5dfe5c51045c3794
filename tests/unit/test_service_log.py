"""The log file that a server writes itself: everything in it, rotated, and no reason to fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import logging, os, sys
from pathlib import Path
from mlxpool.parent.log_file import LogFile
LogFile(Path(sys.argv[1]), int(sys.argv[2])).attach()
logging.basicConfig(level="INFO", format="%(message)s")
"""


def run(path: Path | str, max_bytes: int, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + code, str(path), str(max_bytes)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_print_log_children_and_last_words_are_in_the_file_in_order(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "parent.log"
    ended = run(
        path,
        10_000,
        "print('one'); logging.info('two'); os.system('echo three'); print('\\udcff é'); sys.exit('end')",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
    assert path.read_text() == "one\ntwo\nthree\n\\udcff é\nend\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_full_file_moves_away_and_no_line_is_lost_or_cut(tmp_path: Path) -> None:
    path = tmp_path / "parent.log"
    run(path, 1000, "for number in range(100): logging.info('line %02d, sixteen', number)")
    kept = (tmp_path / "parent.log.1").read_text() + path.read_text()
    lines = kept.splitlines()
    assert lines == [f"line {number:02d}, sixteen" for number in range(100 - len(lines), 100)]
    assert len(lines) >= 50
    assert all((tmp_path / name).stat().st_size <= 1020 for name in ("parent.log", "parent.log.1"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["parent.log", "parent.log.1"]


def test_a_start_appends_to_what_is_there_and_rotates_what_is_full(tmp_path: Path) -> None:
    path = tmp_path / "parent.log"
    path.write_text("old\n")
    run(path, 1000, "print('new')")
    assert path.read_text() == "old\nnew\n"
    path.write_text("x" * 1001)
    run(path, 1000, "print('new')")
    assert path.read_text() == "new\n"
    assert (tmp_path / "parent.log.1").read_text() == "x" * 1001


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full here")
def test_a_full_disk_loses_lines_and_not_the_server() -> None:
    ended = run("/dev/full", 1000, "print('lost'); logging.error('lost'); sys.exit(7)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "", "")
