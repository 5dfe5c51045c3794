"""Jobs: what a row says, in which order they run, how they end. The processes are real, if small."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from mlxpool.parent.jobs import process as job_process
from mlxpool.parent.jobs.kinds import KINDS
from mlxpool.parent.jobs.runner import Jobs
from mlxpool.parent.jobs.store import MAX_ENDED_ROWS, Job, JobStore
from mlxpool.shared.config import Settings
from mlxpool.shared.errors import ApiError

SAY = "import sys, os, time, signal, subprocess\nsay = lambda line: print(line, flush=True)\n"
DONE = 'say(\'{"type":"done","result":{"answer":42}}\')'


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of the tests' kind: what its process does."""

    code: str


class ScriptKind:
    config = Script

    def argv(self, config: Script, _: Settings) -> list[str]:
        return [sys.executable, "-c", SAY + config.code]


class Seen:
    """Every row that subscribers heard of, and a way to wait for one."""

    def __init__(self, jobs: Jobs) -> None:
        self.rows: list[Job] = []
        self._changed = asyncio.Event()
        jobs.subscribe(self._hear)

    def _hear(self, job: Job) -> None:
        self.rows.append(job)
        self._changed.set()

    async def until(self, job: Job, *statuses: str, message: str | None = None) -> Job:
        async with asyncio.timeout(20):
            while True:
                for row in self.rows:
                    if row.id == job.id and row.status in statuses and message in (None, row.message):
                        return row
                self._changed.clear()
                await self._changed.wait()

    def statuses(self, job: Job) -> list[str]:
        return list(dict.fromkeys(row.status for row in self.rows if row.id == job.id))


@pytest.fixture
async def jobs(tmp_path: Path) -> AsyncIterator[Jobs]:
    made = Jobs(Settings(home=tmp_path), tmp_path, kinds={"script": ScriptKind(), **KINDS})
    yield made
    await made.close()


def submit(jobs: Jobs, code: str) -> Job:
    return jobs.submit("script", {"code": code})


def progress(share: float, message: str) -> str:
    name, _, message = message.partition(" ")
    return f'say(\'{{"type":"stage","name":"{name}","progress":{share},"message":"{message}"}}\')'


async def test_a_row_tells_the_jobs_life(jobs: Jobs) -> None:
    seen = Seen(jobs)
    code = "\n".join([progress(0.5, "half"), DONE])
    job = submit(jobs, code)
    assert (job.status, job.kind, job.config, job.progress) == ("queued", "script", {"code": code}, 0.0)
    ended = await seen.until(job, "done")
    assert seen.statuses(job) == ["queued", "running", "done"]
    assert (0.5, "half") in [(row.progress, row.message) for row in seen.rows]
    assert (ended.progress, ended.result, ended.error) == (1.0, {"answer": 42}, None)
    assert ended.started is not None
    assert ended.ended is not None
    assert ended.created <= ended.started <= ended.ended
    assert jobs.find(job.id) == ended


async def test_jobs_run_one_at_a_time_in_their_order(jobs: Jobs, tmp_path: Path) -> None:
    seen = Seen(jobs)
    first, second = (submit(jobs, f"'{n}'\n{DONE}") for n in "12")
    await seen.until(second, "done")
    order = [(row.id, row.status) for row in seen.rows if row.status in ("running", "done")]
    order = list(dict.fromkeys(order))
    assert order == [(first.id, "running"), (first.id, "done"), (second.id, "running"), (second.id, "done")]


async def test_the_same_job_is_one_while_it_is_under_way(jobs: Jobs) -> None:
    seen = Seen(jobs)
    first = submit(jobs, DONE)
    assert submit(jobs, DONE).id == first.id
    await seen.until(first, "done")
    assert submit(jobs, DONE).id != first.id


async def test_a_failure_is_said_in_the_jobs_own_words(jobs: Jobs) -> None:
    seen = Seen(jobs)
    job = submit(jobs, 'say(\'{"type":"failed","error":"no room: 3 GB"}\')\nsys.exit(1)')
    ended = await seen.until(job, "failed")
    assert (ended.error, ended.result) == ("no room: 3 GB", None)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "say('one')\nprint('two', file=sys.stderr)\nsys.exit(3)",
            "the job's process ended: exit code 3: one two",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the job's process ended: killed by SIGKILL"),
        ("pass", "the job's process ended: without a result"),
    ],
)
async def test_a_crash_is_told_with_its_exit_and_last_lines(jobs: Jobs, code: str, error: str) -> None:
    seen = Seen(jobs)
    assert (await seen.until(submit(jobs, code), "failed")).error == error


async def test_nonsense_on_stdout_is_no_message_and_no_harm(jobs: Jobs) -> None:
    seen = Seen(jobs)
    code = f"say('{{\"type\":\"progress\"}}')\nsys.stdout.buffer.write(b'\\xff' * 3000000 + b'\\n')\n{DONE}"
    assert (await seen.until(submit(jobs, code), "done")).result == {"answer": 42}


async def test_cancelling_a_waiting_job_ends_it_at_once(jobs: Jobs) -> None:
    seen = Seen(jobs)
    running = submit(jobs, f"{progress(0.1, 'at it')}\ntime.sleep(60)")
    waiting = submit(jobs, DONE)
    await seen.until(running, "running", message="at it")
    assert jobs.cancel(waiting.id).status == "cancelled"
    jobs.cancel(running.id)
    ended = await seen.until(running, "cancelled")
    assert (ended.message, ended.error) == ("cancelled", None)
    assert seen.statuses(waiting) == ["queued", "cancelled"]


async def test_cancelling_ends_the_process_and_all_it_has_started(jobs: Jobs, tmp_path: Path) -> None:
    seen = Seen(jobs)
    code = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
{progress(0.1, "at it")}
time.sleep(60)
"""
    job = submit(jobs, code)
    await seen.until(job, "running", message="at it")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    jobs.cancel(job.id)
    await seen.until(job, "cancelled")
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert [name for name in os.listdir(tmp_path) if name.endswith(".worker")] == []


async def test_a_job_that_ignores_sigterm_is_killed(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_process, "STOP_GRACE_S", 0.1)
    seen = Seen(jobs)
    code = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{progress(0.1, 'deaf')}\ntime.sleep(60)"
    job = submit(jobs, code)
    await seen.until(job, "running", message="deaf")
    jobs.cancel(job.id)
    assert (await seen.until(job, "cancelled")).status == "cancelled"


async def test_a_job_that_was_asked_for_again_while_it_is_cancelled_runs_again(jobs: Jobs) -> None:
    seen = Seen(jobs)
    code = f"{progress(0.1, 'at it')}\ntime.sleep(60)"
    first = submit(jobs, code)
    await seen.until(first, "running", message="at it")
    jobs.cancel(first.id)
    second = submit(jobs, code)
    assert second.id != first.id
    await seen.until(second, "running", message="at it")


async def test_closing_ends_every_job_and_refuses_new_ones(jobs: Jobs) -> None:
    seen = Seen(jobs)
    running = submit(jobs, f"{progress(0.1, 'at it')}\ntime.sleep(60)")
    waiting = submit(jobs, DONE)
    await seen.until(running, "running", message="at it")
    await jobs.close()
    assert [(row.status, row.message) for row in jobs.store.rows()] == [
        ("cancelled", "the server stopped")
    ] * 2
    assert jobs.find(waiting.id).started is None
    with pytest.raises(ApiError) as caught:
        submit(jobs, DONE)
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")


async def test_a_process_that_cannot_be_started_fails_its_job(jobs: Jobs) -> None:
    class Missing(ScriptKind):
        def argv(self, _config: Script, _: Settings) -> list[str]:
            return ["/nonexistent/program"]

    jobs._kinds = {"script": Missing()}
    seen = Seen(jobs)
    open_before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    ended = await seen.until(submit(jobs, "x"), "failed")
    assert ended.error is not None
    assert ended.error.startswith("the job's process ended: it could not be started: ")
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("bake", {}, "kind is 'bake'; use one of: script, pull"),
        ("pull", {}, "config: Object missing required field `name`"),
        ("pull", {"name": "org/name", "branch": "x"}, "config: Object contains unknown field `branch`"),
        (
            "pull",
            {"name": "../x"},
            "config: '../x' is no model of the Hub; use org/name, like mlx-community/Qwen3-8B-4bit, or"
            " 'starter'",
        ),
        (
            "pull",
            {"name": "starter", "revision": "x"},
            "config: the starter has no revisions; leave `revision` out",
        ),
    ],
)  # fmt: skip
async def test_a_job_that_makes_no_sense_is_refused(
    jobs: Jobs, kind: str, config: dict[str, str], message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        jobs.submit(kind, config)
    assert (caught.value.status, caught.value.code, caught.value.message) == (400, "invalid_request", message)
    assert jobs.store.rows() == []


async def test_an_unknown_job_is_a_404(jobs: Jobs) -> None:
    with pytest.raises(ApiError) as caught:
        jobs.cancel("job_x")
    assert (caught.value.status, caught.value.message) == (
        404,
        "no job 'job_x' here; GET /api/jobs lists those there are",
    )


def test_a_pulls_command_holds_what_was_asked_for_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    kind = KINDS["pull"]
    config = msgspec.convert({"name": "org/name", "revision": "v1"}, kind.config)
    assert kind.argv(config, Settings(home=Path("/h")))[1:] == [
        "-m", "mlxpool.parent.hub.pull_process", "--home", "/h", "--revision", "v1", "org/name",
    ]  # fmt: skip


def test_old_rows_are_forgotten_and_running_ones_never() -> None:
    store = JobStore(now=lambda: 7.0)
    running = store.add("k", {"n": "kept"})
    store.start(running.id)
    ended = []
    for n in range(MAX_ENDED_ROWS + 5):
        job = store.add("k", {"n": n})
        store.end(job.id, "done", message="done")
        ended.append(job.id)
    last = store.add("k", {})
    kept = [row.id for row in store.rows()]
    assert kept[0] == last.id
    assert kept[-1] == running.id
    assert kept[1:-1] == list(reversed(ended[5:]))
    assert store.get(ended[4]) is None


def test_a_row_ends_once_and_a_subscriber_may_leave() -> None:
    store = JobStore(now=lambda: 7.0)
    heard: list[Job] = []
    leave = store.subscribe(heard.append)
    job = store.add("k", {})
    store.end(job.id, "cancelled", message="cancelled")
    store.end(job.id, "failed", message="failed", error="late")
    assert [row.status for row in heard] == ["queued", "cancelled"]
    leave()
    store.add("k", {})
    assert len(heard) == 2


def test_a_served_parent_never_loads_the_hubs_client() -> None:
    heavy = "('huggingface_hub', 'httpx2')"
    code = f"import sys, mlxpool.parent.serve; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"
