"""Jobs: what a row says, in which order they run, how they end. The processes are real, if small."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from mlxpool.parent.jobs import process as job_process
from mlxpool.parent.jobs import runner
from mlxpool.parent.jobs.kinds.kind import Here
from mlxpool.parent.jobs.kinds.pull import Pull
from mlxpool.parent.jobs.store import MAX_ENDED_ROWS, Job, JobStore
from mlxpool.parent.library import Library
from mlxpool.shared.config import Settings
from mlxpool.shared.errors import ApiError
from tests.unit.jobs_world import DONE, FOREVER, World, running, stage


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as made:
        yield made


async def test_a_row_and_the_events_tell_the_jobs_life(world: World) -> None:
    code = "\n".join(
        [stage(0.5, "half way"), 'say(\'{"type":"metric","values":{"loss":2.5}}\')', "say('a word')", DONE]
    )
    job = await world.submit(code)
    assert (job.status, job.kind, job.config, job.progress) == ("queued", "script", {"code": code}, 0.0)
    ended = await world.until(job, "done")
    assert world.statuses(job) == ["queued", "running", "done"]
    assert (0.5, "half way") in [(row.progress, row.message) for row in world.rows]
    assert (ended.progress, ended.result, ended.error) == (1.0, {"answer": 42}, None)
    assert ended.started is not None
    assert ended.ended is not None
    assert ended.created <= ended.started <= ended.ended
    assert world.jobs.find(job.id) == ended
    assert await world.events(job) == [
        ("started", {}),
        ("stage", {"name": "half", "progress": 0.5, "message": "way"}),
        ("metric", {"values": {"loss": 2.5}}),
        ("log", {"line": "a word"}),
        ("done", {"result": {"answer": 42}}),
    ]


async def test_a_job_knows_its_id_and_where_the_server_is(world: World) -> None:
    code = "say(f\"{os.environ['JOB_ID']} {os.environ['OWN_URL']}\")\n" + DONE
    job = await world.submit(code)
    await world.until(job, "done")
    assert ("log", {"line": f"{job.id} http://127.0.0.1:1"}) in await world.events(job)


async def test_jobs_of_a_kind_run_one_at_a_time_in_their_order(world: World) -> None:
    first, second = [await world.submit(DONE, number=number) for number in (1, 2)]
    await world.until(second, "done")
    order = [(row.id, row.status) for row in world.rows if row.status in ("running", "done")]
    assert list(dict.fromkeys(order)) == [
        (first.id, "running"), (first.id, "done"), (second.id, "running"), (second.id, "done"),
    ]  # fmt: skip


async def test_other_kinds_run_beside_it(world: World) -> None:
    long = await world.submit(f"{stage(0.1, 'at it')}\n{FOREVER}")
    await world.until(long, "running", message="at it")
    await world.until(await world.submit(DONE, "other"), "done")
    await world.until(await world.submit(DONE, "heavy"), "done")
    assert world.jobs.find(long.id).status == "running"


async def test_kinds_that_compute_share_one_line_and_the_lease_outlasts_the_process(world: World) -> None:
    here = f"open({str(world.home / 'seen')!r}, 'a').write('x')\n{DONE}"
    first, second = await world.submit(here, "heavy"), await world.submit(here, "weighty")

    def ended(job: Job) -> None:
        if job.status in ("running", "done"):
            world.gpu.told.append(f"{job.kind} {job.status}")

    world.jobs.subscribe(ended)
    await world.until(second, "done")
    assert world.jobs.find(first.id).status == "done"
    assert list(dict.fromkeys(world.gpu.told[:6])) == [
        "asked by heavy open(' for 7", "lent", "heavy running", "given back", "heavy done",
        "asked by weighty open for 7",
    ]  # fmt: skip


async def test_a_job_is_queued_until_the_gpu_is_lent(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LASTING_WAIT_S", 0.0)
    world.gpu.free.clear()
    job = await world.submit(DONE, "heavy")
    waiting = await world.until(job, "queued", message="waits for the GPU")
    assert (waiting.started, world.jobs.find(job.id).status) == (None, "queued")
    world.gpu.free.set()
    await world.until(job, "done")
    assert world.statuses(job) == ["queued", "running", "done"]
    assert [kind for kind, _ in await world.events(job)] in (
        ["stage", "started", "done"],
        ["started", "done"],
    )


async def test_a_lease_that_can_never_be_had_fails_the_job_with_its_reason(world: World) -> None:
    ended = await world.until(await world.submit("never", "heavy"), "failed")
    assert (ended.error, ended.started) == ("7 bytes will never be free", None)


async def test_a_job_that_waits_for_the_gpu_gives_up_its_place_when_cancelled(world: World) -> None:
    world.gpu.free.clear()
    job, behind = await world.submit(DONE, "heavy"), await world.submit(DONE, "weighty")
    await world.until(job, "queued", message="waits for the GPU")
    world.jobs.cancel(job.id)
    ended = await world.until(job, "cancelled")
    assert (ended.message, ended.started, world.gpu.told[1]) == ("cancelled", None, "given up")
    assert await world.events(job) == [("cancelled", {"message": "cancelled"})]
    world.gpu.free.set()
    await world.until(behind, "done")


async def test_a_running_job_that_is_cancelled_keeps_the_gpu_until_it_is_gone(world: World) -> None:
    # Other tests' servers may still be there.
    others = set(psutil.Process().children(recursive=True))
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    job = await world.submit(f"{child}\n{stage(0.1, 'at it')}\n{FOREVER}", "heavy")
    await world.until(job, "running", message="at it")
    group = set(psutil.Process().children(recursive=True)) - others
    alive: list[int] = []

    def at_end(row: Job) -> None:
        if row.status == "cancelled":
            alive.extend(one.pid for one in group if _runs(one))
            alive.extend([] if world.gpu.told[-1] == "given back" else [-1])

    world.jobs.subscribe(at_end)
    world.jobs.cancel(job.id)
    await world.until(job, "cancelled")
    assert len(group) >= 2
    assert alive == []


async def test_what_a_job_has_started_is_gone_when_its_row_ends(world: World) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    code = f"""child = subprocess.Popen([sys.executable, "-c", {deaf!r}], stdout=subprocess.PIPE)
child.stdout.readline()
say(f"child {{child.pid}}")
{DONE}"""
    job = await world.submit(code)
    await world.until(job, "done")
    (line,) = [event["line"] for kind, event in await world.events(job) if kind == "log"]
    pid = int(str(line).removeprefix("child "))
    assert not psutil.pid_exists(pid) or not _runs(psutil.Process(pid))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_the_same_job_is_one_while_it_is_under_way(world: World) -> None:
    looked = threading.Barrier(2, timeout=60)
    world.script.looking = looked.wait
    # Both look at the files at the same time.
    first, second = await asyncio.gather(world.submit(DONE), world.submit(DONE))
    assert first.id == second.id
    world.script.looking = lambda: None
    await world.until(first, "done")
    assert (await world.submit(DONE)).id != first.id


async def test_a_failure_is_said_in_the_jobs_own_words(world: World) -> None:
    job = await world.submit('say(\'{"type":"failed","error":"no room: 3 GB"}\')\nsys.exit(1)')
    ended = await world.until(job, "failed")
    assert (ended.error, ended.result) == ("no room: 3 GB", None)
    assert (await world.events(job))[-1] == ("failed", {"error": "no room: 3 GB"})


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "say('one')\nprint('two', file=sys.stderr)\nsys.exit(3)",
            "the job's process ended: exit code 3: one two",
        ),
        (
            "sys.stdout.write('no line end'); sys.stdout.flush(); sys.exit(3)",
            "the job's process ended: exit code 3: no line end",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the job's process ended: killed by SIGKILL"),
        ("pass", "the job's process ended: without a result"),
        ("needs", "a fault of the server's: RuntimeError: no needs today"),
    ],
)
async def test_a_crash_is_told_with_its_exit_and_last_lines(world: World, code: str, error: str) -> None:
    assert (await world.until(await world.submit(code), "failed")).error == error


async def test_nonsense_on_stdout_is_no_message_and_no_harm(world: World) -> None:
    code = f"""say('{{"type":"progress"}}')
say('{{"type":"stage","name":"n","progress":1e999}}')
sys.stdout.buffer.write(b'\\xff' * 3000000 + b'\\n')
say('\\x1b[31mred\\x1b[0m 10%\\r\\x1b[31mred\\x1b[0m 20%')
{DONE}"""
    job = await world.submit(code)
    assert (await world.until(job, "done")).result == {"answer": 42}
    lines = [event["line"] for kind, event in await world.events(job) if kind == "log"]
    assert lines[:2] == ['{"type":"progress"}', '{"type":"stage","name":"n","progress":1e999}']
    # Of a bar that was drawn over itself, the last.
    assert lines[-1] == "red 20%"


async def test_a_job_that_is_cancelled_at_any_moment_of_its_turns_beginning_ends(world: World) -> None:
    world.gpu.free.clear()
    for moment in range(12):
        before = await world.submit(FOREVER, kind="heavy", number=2 * moment)
        job = await world.submit(FOREVER, kind="heavy", number=2 * moment + 1)
        world.jobs.cancel(before.id)
        for _ in range(moment):
            await asyncio.sleep(0)
        world.jobs.cancel(job.id)
        assert (await world.until(job, "cancelled")).message == "cancelled"


async def test_cancelling_a_waiting_job_ends_it_at_once(world: World) -> None:
    at_work = await world.submit(f"{stage(0.1, 'at it')}\n{FOREVER}")
    waiting = await world.submit(DONE)
    await world.until(at_work, "running", message="at it")
    assert world.jobs.cancel(waiting.id).status == "cancelled"
    world.jobs.cancel(at_work.id)
    ended = await world.until(at_work, "cancelled")
    assert (ended.message, ended.error) == ("cancelled", None)
    assert world.statuses(waiting) == ["queued", "cancelled"]
    assert world.jobs.cancel(waiting.id) == world.jobs.find(waiting.id)


async def test_a_job_that_ignores_sigterm_is_killed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_process, "STOP_GRACE_S", 0.1)
    job = await world.submit(
        f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{stage(0.1, 'deaf')}\n{FOREVER}"
    )
    await world.until(job, "running", message="deaf")
    world.jobs.cancel(job.id)
    assert (await world.until(job, "cancelled")).status == "cancelled"
    assert [name for name in os.listdir(world.home) if name.endswith(".worker")] == []


async def test_a_job_that_was_asked_for_again_while_it_is_cancelled_runs_again(world: World) -> None:
    code = f"{stage(0.1, 'at it')}\n{FOREVER}"
    first = await world.submit(code)
    await world.until(first, "running", message="at it")
    world.jobs.cancel(first.id)
    second = await world.submit(code)
    assert second.id != first.id
    await world.until(second, "running", message="at it")


async def test_closing_ends_every_job_and_refuses_new_ones(world: World) -> None:
    world.gpu.free.clear()
    lent = await world.submit(DONE, "heavy")
    at_work = await world.submit(f"{stage(0.1, 'at it')}\n{FOREVER}")
    waiting = await world.submit(DONE)
    await world.until(at_work, "running", message="at it")
    await world.until(lent, "queued", message="waits for the GPU")
    await world.jobs.close()
    assert [(row.status, row.message) for row in world.jobs.store.rows()] == [
        ("cancelled", "the server stopped")
    ] * 3
    assert world.jobs.find(waiting.id).started is None
    with pytest.raises(ApiError) as caught:
        await world.submit(DONE)
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")


async def test_a_process_that_cannot_be_started_fails_its_job(world: World) -> None:
    await world.until(await world.submit(DONE), "done")
    open_before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    ended = await world.until(await world.submit("missing"), "failed")
    assert ended.error is not None
    assert ended.error.startswith("the job's process could not be started: ")
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) == open_before


async def test_a_full_disk_where_processes_are_recorded_keeps_no_job_from_running(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job_process.reaper, "record", full)
    assert (await world.until(await world.submit(DONE), "done")).result == {"answer": 42}


async def test_more_jobs_than_may_wait_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_WAITING", 2)
    at_work = await world.submit(f"{stage(0.1, 'at it')}\n{FOREVER}")
    await world.until(at_work, "running", message="at it")
    for number in (1, 2):
        await world.submit(DONE, number=number)
    with pytest.raises(ApiError) as caught:
        await world.submit(DONE, number=3)
    assert (caught.value.status, caught.value.message) == (429, "2 jobs wait already, the limit")


@pytest.mark.parametrize(
    ("kind", "config", "param", "message"),
    [
        ("bake", {}, "kind", "kind is 'bake'; use one of: script, other, heavy, weighty, pull"),
        (
            "script",
            {"code": ""},
            "config.code",
            "config.code: there is nothing to run; config.number: so it has none",
        ),
        ("pull", {}, "config.name", "config.name: missing"),
        (
            "pull",
            {"name": "../x"},
            "config",
            "config: '../x' is no model of the Hub; use org/name, like mlx-community/Qwen3-8B-4bit, or"
            " 'starter'",
        ),
        (
            "pull",
            {"name": "starter", "revision": "x"},
            "config",
            "config: the starter has no revisions; leave `revision` out",
        ),
    ],
)
async def test_a_job_that_makes_no_sense_is_refused(
    world: World, kind: str, config: dict[str, str], param: str, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        await world.jobs.submit(kind, config)
    assert (caught.value.status, caught.value.param, caught.value.message) == (400, param, message)
    assert world.jobs.store.rows() == []


async def test_an_unknown_job_is_a_404(world: World) -> None:
    with pytest.raises(ApiError) as caught:
        world.jobs.cancel("job_x")
    assert (caught.value.status, caught.value.message) == (
        404,
        "no job 'job_x' here; GET /api/jobs lists those there are",
    )


def test_a_pulls_command_holds_what_was_asked_for_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    settings = Settings(home=tmp_path)
    config = msgspec.convert({"name": "org/name", "revision": "v1"}, Pull.config)
    assert Pull().argv(config, Here(settings, Library(settings), "cpu"))[1:] == [
        "-m", "mlxpool.parent.hub.pull_process", "--home", str(tmp_path), "--revision", "v1", "org/name",
    ]  # fmt: skip


def test_old_rows_are_forgotten_and_running_ones_never() -> None:
    store = JobStore(now=lambda: 7.0)
    gone: list[str] = []
    store.forgotten = gone.append
    at_work = store.add("k", {"n": "kept"})
    store.start(at_work.id)
    ended = []
    for n in range(MAX_ENDED_ROWS + 5):
        job = store.add("k", {"n": n})
        store.end(job.id, "done", message="done")
        ended.append(job.id)
    last = store.add("k", {})
    kept = [row.id for row in store.rows()]
    assert kept == [last.id, *reversed(ended[5:]), at_work.id]
    assert gone == ended[:5]


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
