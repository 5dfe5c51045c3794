"""What a killed parent left is ended by the next one, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from mlxpool.parent.pool import reaper


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)


def test_a_recorded_process_is_killed_even_when_it_is_stopped(tmp_path: Path):
    process = sleeper()
    path = reaper.record(tmp_path, process.pid)
    assert path is not None
    (tmp_path / "1.sock").touch()
    os.kill(process.pid, signal.SIGSTOP)
    assert reaper.reap(tmp_path) == [process.pid]
    assert process.wait(60) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_another_process_that_has_the_pid_by_now_is_left_alone(tmp_path: Path):
    process = sleeper()
    try:
        born = reaper.birth(process.pid)
        old = reaper.WorkerRecord(process.pid, f"{born}1")
        (tmp_path / f"{process.pid}.worker").write_bytes(msgspec.json.encode(old))
        assert reaper.reap(tmp_path) == []
        assert process.poll() is None
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_a_broken_record_is_removed(tmp_path: Path):
    (tmp_path / "7.worker").write_text("{")
    assert reaper.reap(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_gone_has_no_birth(tmp_path: Path):
    process = sleeper()
    assert reaper.birth(process.pid) == reaper.birth(process.pid) is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert reaper.birth(process.pid) is None  # a zombie holds nothing
    process.wait()
    assert reaper.record(tmp_path, process.pid) is None
