"""Scripted parents that are forked off behave as processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.tools.forked_up import ForkedUp
from tests.tools.served import serve


def forked(tmp_path: Path, *argv: str) -> ForkedUp:
    with (tmp_path / "log").open("wb") as log:
        return ForkedUp(["--home", str(tmp_path), "--port", "0", *argv], {}, log)


def test_bad_usage_is_told_in_its_log_and_by_its_exit_code(tmp_path: Path) -> None:
    process = forked(tmp_path, "--set", "pol.x=1")
    assert process.wait(60) == process.poll() == process.returncode == 2
    assert (tmp_path / "log").read_text().startswith("scripted_up: --set pol.x=1: use SECTION.KEY=VALUE")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 0)])
async def test_a_signal_ends_the_one_that_it_is_sent_to(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    async with serve(tmp_path / "one", scripted=True) as one, serve(tmp_path / "two", scripted=True) as two:
        with pytest.raises(subprocess.TimeoutExpired):
            two.process.wait(0.01)
        assert await two.down(number) == code
        assert not psutil.pid_exists(two.process.pid)
        assert one.process.poll() is None
        assert (await one.request("GET", "/health")).status == 200
    assert one.process.returncode == 0


# A run of tests that has started a parent, says its number, and waits to be killed.
RUN = """
import sys
from pathlib import Path
from tests.unit.test_forked_up import forked
print(forked(Path(sys.argv[1])).pid, flush=True)
sys.stdin.read()
"""


def test_what_was_forked_ends_with_tests_that_are_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as run:
        assert run.stdout is not None
        child = psutil.Process(int(run.stdout.readline()))
        nursery = psutil.Process(child.ppid())
        assert nursery.ppid() == run.pid
        run.kill()
    for process in (child, nursery):
        process.wait(60)
        assert not process.is_running()


async def test_each_has_the_environment_that_it_was_given(tmp_path: Path) -> None:
    settings = {"server.api_keys": "sk-1"}
    async with serve(tmp_path / "open", scripted=True) as served:
        assert (await served.request("GET", "/v1/models")).status == 200
    async with serve(tmp_path / "closed", scripted=True, settings=settings) as served:
        assert (await served.request("GET", "/v1/models")).status == 401
