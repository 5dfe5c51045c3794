"""The lock of a model's stage: one at a time, and nothing left behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mlxpool.shared import staging
from mlxpool.shared.staging import PullError

WAIT_S = 60


def refused(models: Path) -> bool:
    try:
        with staging.locked(models, "org/name", None):
            return False
    except PullError:
        return True


def test_the_lock_is_held_while_it_is_and_leaves_no_file(tmp_path: Path) -> None:
    with staging.locked(tmp_path, "org/name", None):
        assert os.listdir(tmp_path) == [".org--name.lock"]
        assert refused(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="broke"), staging.locked(tmp_path, "org/name", None):
        raise ValueError("broke")
    assert os.listdir(tmp_path) == []
    assert not refused(tmp_path)


def test_a_lock_that_a_killed_process_left_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".org--name.lock").touch()
    assert not refused(tmp_path)
    assert os.listdir(tmp_path) == []


def test_who_waited_has_it_alone_although_the_file_was_taken_away_meanwhile(tmp_path: Path) -> None:
    waits, holds, go = threading.Event(), threading.Event(), threading.Event()
    times_told = []

    def waiting() -> None:
        times_told.append(1)
        waits.set()

    def second() -> None:
        with staging.locked(tmp_path, "org/name", waiting):
            holds.set()
            assert go.wait(WAIT_S)

    thread = threading.Thread(target=second)
    with staging.locked(tmp_path, "org/name", None):
        thread.start()
        assert waits.wait(WAIT_S)
        assert not holds.is_set()
    assert holds.wait(WAIT_S)
    assert refused(tmp_path)
    go.set()
    thread.join(WAIT_S)
    assert len(times_told) == 1
    assert os.listdir(tmp_path) == []


def test_many_at_once_are_never_two(tmp_path: Path) -> None:
    inside, most, done = 0, 0, 0
    mutex = threading.Lock()

    def work() -> None:
        nonlocal inside, most, done
        for _ in range(50):
            with staging.locked(tmp_path, "a", lambda: None):
                with mutex:
                    inside += 1
                    most = max(most, inside)
                with mutex:
                    inside -= 1
                    done += 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (most, done) == (1, 300)
    assert os.listdir(tmp_path) == []
