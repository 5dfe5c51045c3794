"""The GPU is lent to a job and comes back: over real sockets and processes, with scripted workers and tiny
models."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tools import sse
from tests.tools.running_engine import Running, plan
from tests.tools.running_engine import until as turned
from tests.tools.scripted_lease import borrow
from tests.tools.scripted_script import expected_text, make_scripted_model, read_events
from tests.tools.served import Served, chat_body, gone, serve, until
from tests.tools.tiny_fixture import TinyModels
from tests.tools.worker_process import WorkerProcess, streamed_text

WEIGHTS = 400_000_000
PATIENCE_S = 60.0


@contextlib.asynccontextmanager
async def lending(tmp: Path, **more: Any) -> AsyncIterator[Served]:
    """A parent with scripted workers that lends the GPU to `borrow`."""
    flags = ["--lend", *more.pop("flags", [])]
    async with serve(tmp, models=tmp / "m", scripted=True, flags=flags, **more) as served:
        await until((served.home / "lend.sock").exists, PATIENCE_S)
        yield served


async def leases(served: Served) -> dict[str, Any]:
    return dict((await served.pool())["leases"])


def told(models: Path, name: str, *kinds: str) -> list[str]:
    """What the scripted worker of this model noted, of these kinds, in order."""
    return [e["event"] for e in read_events(models / name) if e["event"] in kinds]


# ---- the pool, with scripted workers


async def test_running_streams_end_untouched_then_the_job_has_the_gpu_then_who_came_later_is_served(
    tmp_path: Path,
):
    make_scripted_model(tmp_path / "m", "a", tokens=160, tokens_per_s=40.0)
    async with lending(tmp_path) as served:
        await served.chat("a", "warm", max_tokens=1)
        streams = [asyncio.create_task(served.stream("a", f"s{i}")) for i in range(2)]
        await until(lambda: told(tmp_path / "m", "a", "request").count("request") == 3, PATIENCE_S)
        async with borrow(served.home, "quantize x") as job:
            await until(lambda: _holder_is(served, "quantize x"), PATIENCE_S)
            late = asyncio.create_task(served.chat("a", "late", max_tokens=3))
            await until(lambda: _queued(served, 1), PATIENCE_S)
            pool = await served.pool()
            assert pool["leases"] == {"shared": 2, "exclusive": 0, "waiting": 2, "holder": "quantize x"}
            assert (await job.told()).code == ""
            assert [stream.done() for stream in streams] == [True, True] or await _all(streams)
            for i, stream in enumerate(streams):
                assert (await stream).text == expected_text("a", f"s{i}", 160)
            pool = await served.pool()
            assert pool["leases"] == {"shared": 0, "exclusive": 1, "waiting": 1, "holder": "quantize x"}
            (waiting,) = pool["queue"]
            assert (waiting["model"], waiting["waits_for"]) == ("a", "lease")
            assert waiting["holder"] == "quantize x"
            assert not late.done()
            assert told(tmp_path / "m", "a", "request", "leased") == ["request"] * 3 + ["leased"]
            await job.give_back()
            assert (await late).text == expected_text("a", "late", 3)
        assert await leases(served) == {"shared": 0, "exclusive": 0, "waiting": 0, "holder": None}
        assert told(tmp_path / "m", "a", "leased", "unleased") == ["leased", "unleased"]


async def _all(streams: list[asyncio.Task[Any]]) -> bool:
    """The last bytes of an answer that the pool knows to be over may still be on their way."""
    await asyncio.wait_for(asyncio.gather(*streams), PATIENCE_S)
    return True


async def _holder_is(served: Served, holder: str) -> bool:
    return bool((await leases(served))["holder"] == holder)


async def _queued(served: Served, count: int) -> bool:
    return len((await served.pool())["queue"]) == count


async def test_who_waits_too_long_hears_who_has_the_gpu_and_who_leaves_starts_nothing(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a")
    make_scripted_model(tmp_path / "m", "cold")
    async with lending(tmp_path, settings={"pool.queue_timeout": "500ms"}) as served:
        await served.chat("a")
        async with borrow(served.home, "finetune my-model") as job:
            await job.told()
            answers = await asyncio.gather(
                served.chat("a"), served.chat("cold"), served.chat("a", stream=True)
            )
            for answer in answers:
                assert (answer.status, answer.code) == (503, "gpu_leased")
                assert "the GPU is held by finetune my-model" in answer.body["error"]["message"]
                assert int(answer.headers["retry-after"]) >= 1
            assert not told(tmp_path / "m", "cold", "started")
        assert (await served.chat("cold")).status == 200


async def test_a_stream_behind_a_lease_is_opened_and_kept_alive_and_then_answered_whole(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a")
    async with lending(tmp_path, flags=["--open-after", "0.05", "--keep-alive", "0.05"]) as served:
        await served.chat("a")
        async with borrow(served.home, "quantize x") as job:
            await job.told()
            body = chat_body("a", "late", stream=True)
            async with served.client.post(f"{served.url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
                said = b""
                while said.count(b"data: ") < 3:
                    said += await asyncio.wait_for(answer.content.readany(), PATIENCE_S)
                assert b"a:late" not in said
                assert not told(tmp_path / "m", "a", "request")[1:]
                shown = await asyncio.to_thread(_status, served.home)
                assert "GPU      held by quantize x" in shown
                await job.give_back()
                said += await answer.read()
            assert sse.read_chat(said).text == expected_text("a", "late")


def _status(home: Path) -> str:
    """What a terminal is told."""
    command = [sys.executable, "-m", "mlxpool.parent", "status", "--home", str(home)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def test_a_client_that_leaves_behind_a_lease_starts_nothing_and_a_load_says_what_it_waits_for(
    tmp_path: Path,
):
    for name in ("warm", "left", "loaded"):
        make_scripted_model(tmp_path / "m", name)
    async with lending(tmp_path) as served:
        await served.chat("warm")
        async with borrow(served.home, "quantize x") as job:
            await job.told()
            leaver = asyncio.create_task(served.chat("left"))
            await until(lambda: _queued(served, 1), PATIENCE_S)
            leaver.cancel()
            await until(lambda: _queued(served, 0), PATIENCE_S)
            state = (await served.request("POST", "/api/models/loaded/load")).body
            assert state["state"] == "absent"
            assert state["reason"] == "its load waits: the GPU is held by quantize x"
            # What has nothing to do with the GPU goes on.
            assert (await served.request("POST", "/api/models/warm/unload")).status == 202
            await served.until_state("warm", "absent", timeout_s=PATIENCE_S)
        await served.until_state("loaded", "ready", timeout_s=PATIENCE_S)
        assert not told(tmp_path / "m", "left", "started")


async def test_a_model_whose_settings_change_under_a_lease_serves_by_the_new_ones_after_it(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a")
    config = "[models.a]\nthinking = {}\n"
    async with lending(tmp_path, config=config.format("true")) as served:
        await served.chat("a")
        pid = (await served.worker("a") or {})["pid"]
        async with borrow(served.home, "quantize x") as job:
            await job.told()
            (served.home / "config.toml").write_text(config.format("false"))
            reloaded = await served.request("POST", "/api/config/reload")
            assert reloaded.body["changed"] == ["models.a.thinking"]
            await served.until_state("a", "absent", timeout_s=PATIENCE_S)
            late = asyncio.create_task(served.chat("a", "late"))
            await until(lambda: _queued(served, 1), PATIENCE_S)
            await gone([pid], PATIENCE_S)
        assert (await late).text == expected_text("a", "late")


async def test_a_leased_worker_that_is_killed_holds_nothing_and_its_requests_are_served_afterwards(
    tmp_path: Path,
):
    make_scripted_model(tmp_path / "m", "a")
    async with lending(tmp_path) as served:
        await served.chat("a")
        async with borrow(served.home, "quantize x") as job:
            await job.told()
            late = asyncio.create_task(served.chat("a", "late"))
            await until(lambda: _queued(served, 1), PATIENCE_S)
            pid = (await served.worker("a"))["pid"]
            os.kill(pid, signal.SIGKILL)
            await until(lambda: _crashes(served, 1), PATIENCE_S)
            assert (await leases(served))["exclusive"] == 1
            assert not late.done()
        assert (await late).text == expected_text("a", "late")


async def _crashes(served: Served, count: int) -> bool:
    return bool((await served.pool())["counters"]["crashes"] == count)


async def test_a_worker_that_does_not_let_go_is_ended_and_the_job_has_the_gpu(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "stuck", never_lease=True)
    async with lending(tmp_path, settings={"pool.stall_timeout": "1s"}) as served:
        await served.chat("stuck")
        async with borrow(served.home, "quantize x") as job:
            assert (await job.told()).code == ""
            counters = (await served.pool())["counters"]
            assert counters["crashes"] == 1
        assert any("did not let go of the GPU" in e["detail"] for e in (await served.pool())["recent"])


async def test_a_worker_whose_lease_breaks_is_ended_and_the_job_goes_on(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "fickle", ends_lease=True)
    async with lending(tmp_path) as served:
        await served.chat("fickle")
        async with borrow(served.home, "quantize x") as job:
            assert (await job.told()).code == ""
            await until(lambda: _crashes(served, 1), PATIENCE_S)
            pool = await served.pool()
            assert pool["leases"]["exclusive"] == 1
            (crash,) = [e for e in pool["recent"] if e["event"] == "crash"]
            assert crash["detail"] == "it ended its lease of the GPU"
        assert (await served.chat("fickle")).status == 200


async def test_a_job_gets_its_memory_from_idle_models_and_one_that_never_fits_hears_the_numbers(
    tmp_path: Path,
):
    make_scripted_model(tmp_path / "m", "old", weights_bytes=WEIGHTS)
    make_scripted_model(tmp_path / "m", "kept", weights_bytes=WEIGHTS)
    async with lending(tmp_path, budget="2400MB") as served:
        await served.chat("old")
        await served.chat("kept")
        await served.request("POST", "/api/models/kept/pin")
        async with borrow(served.home, "finetune m", 1_000_000_000) as job:
            assert (await job.told()).code == ""
            pool = await served.pool()
            assert [w["model"] for w in pool["workers"]] == ["kept"]
            assert pool["reserved_bytes"] <= pool["budget_bytes"]
            assert pool["reserved_bytes"] >= 1_000_000_000 + WEIGHTS
        async with borrow(served.home, "finetune big", 2_200_000_000) as job:
            refusal = await job.told()
            assert refusal.code == "model_too_large"
            assert "finetune big needs 2.2 GB of memory, but pinned models (kept) hold" in refusal.message
        async with borrow(served.home, "finetune huge", 3_000_000_000) as job:
            assert "more than the memory budget of 2.4 GB" in (await job.told()).message


async def test_jobs_and_requests_take_turns_and_one_that_gives_up_opens_the_gate(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a")
    async with lending(tmp_path) as served:
        await served.chat("a")
        async with borrow(served.home, "first") as first:
            await first.told()
            between = asyncio.create_task(served.chat("a", "between"))
            await until(lambda: _queued(served, 1), PATIENCE_S)
            async with borrow(served.home, "second") as second:
                await until(lambda: _waiting(served, 2), PATIENCE_S)
                after = asyncio.create_task(served.chat("a", "after"))
                await until(lambda: _queued(served, 2), PATIENCE_S)
                await first.give_back()
                assert (await between).text == expected_text("a", "between")
                await second.told()
                assert not after.done()
            assert (await after).text == expected_text("a", "after")
        async with borrow(served.home, "third") as third:
            await third.told()
            async with borrow(served.home, "gives up"):
                await until(lambda: _waiting(served, 1), PATIENCE_S)
            await until(lambda: _waiting(served, 0), PATIENCE_S)
        assert (await served.chat("a")).status == 200


async def _waiting(served: Served, count: int) -> bool:
    return bool((await leases(served))["waiting"] == count)


async def test_the_server_stops_under_a_lease_and_leaves_nothing(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a")
    async with lending(tmp_path) as served:
        await served.chat("a")
        async with borrow(served.home, "holds"), borrow(served.home, "waits") as waits:
            await until(lambda: _waiting(served, 1), PATIENCE_S)
            refused = asyncio.create_task(served.chat("a"))
            await until(lambda: _queued(served, 1), PATIENCE_S)
            pids = served.worker_pids()
            assert await served.down() == 0
            assert (await waits.told()).code == "shutting_down"
            assert (await refused).code == "shutting_down"
            await gone(pids, PATIENCE_S)


# ---- a real worker

GREEDY: dict[str, Any] = {"temperature": 0.0, "logit_bias": {"258": -100}}


@pytest.fixture(scope="module")
def worker(tiny: TinyModels) -> Iterator[WorkerProcess]:
    with WorkerProcess(tiny("llama"), context=2048, batch=2).ready() as worker:
        yield worker


class NativeLease:
    """The connection that is a worker's lease; `wait` returns its first line."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._connection = worker.connection()
        self._connection.request("POST", "/control/lease")

    def wait(self) -> dict[str, Any]:
        response = self._connection.getresponse()
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/x-ndjson"
        return dict(json.loads(response.readline()))

    def close(self) -> None:
        assert self._connection.sock is not None
        self._connection.sock.close()
        self._connection.close()


def test_a_worker_ends_the_rows_it_let_in_then_rests_and_serves_what_came_meanwhile(worker: WorkerProcess):
    alone = [worker.text(f"row {i}", max_tokens=150, **GREEDY) for i in range(2)]
    third = worker.text("third", max_tokens=5, **GREEDY)
    with ThreadPoolExecutor(3) as pool:
        chunks = [worker.stream(f"row {i}", max_tokens=150, **GREEDY) for i in range(2)]
        begun = [[next(stream), next(stream)] for stream in chunks]
        first, second = NativeLease(worker), NativeLease(worker)
        late = pool.submit(worker.text, "third", max_tokens=5, **GREEDY)
        rest = list(pool.map(list, chunks))
        assert [streamed_text(b + r) for b, r in zip(begun, rest, strict=True)] == alone
        assert first.wait() == {"state": "leased"}
        assert second.wait() == {"state": "leased"}
        stats = worker.stats()
        assert (stats["rows"], stats["waiting"]) == (0, 1)
        for path in ("/control/flush", "/control/cache"):
            body = {"ram_bytes": 0} if path.endswith("cache") else None
            assert worker.request("POST", path, body)[0] == 200
        assert worker.request("GET", "/health")[0] == 200
        progress = stats["progress"]
        first.close()  # leases are counted: the other one is still there
        assert worker.stats()["progress"] == progress
        assert not late.done()
        second.close()
        assert late.result(60) == third


def test_a_client_that_leaves_a_leased_worker_leaves_its_queue(worker: WorkerProcess):
    held = NativeLease(worker)
    held.wait()
    cancelled = worker.stats()["cancelled"]
    leaver = worker.connection()
    leaver.request(
        "POST", "/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": "x"}]})
    )
    _until_stats(worker, lambda stats: stats["waiting"] == 1)
    leaver.close()
    _until_stats(worker, lambda stats: stats["waiting"] == 0 and stats["cancelled"] == cancelled + 1)
    held.close()
    assert worker.text("hello", max_tokens=2, **GREEDY)


def _until_stats(worker: WorkerProcess, true: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true(stats := worker.stats()):
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.01)


def test_a_lease_takes_no_body(worker: WorkerProcess):
    status, body, _ = worker.request("POST", "/control/lease", {"forever": True})
    assert (status, body["error"]["code"]) == (400, "invalid_request")


def test_a_drain_under_a_lease_does_not_wait_for_who_waits_behind_it(tiny: TinyModels):
    with WorkerProcess(tiny("llama"), batch=2).ready() as worker, ThreadPoolExecutor(1) as pool:
        held = NativeLease(worker)
        held.wait()
        waits = pool.submit(worker.request, "POST", "/v1/chat/completions", {
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 2,
        })  # fmt: skip
        _until_stats(worker, lambda stats: stats["waiting"] == 1)
        status, report, _ = worker.request("POST", "/control/drain?timeout_s=300")
        assert status == 200
        assert (report["durable"], report["pending"]) == (True, 1)
        held.close()
        assert waits.result(60)[0] == 200


async def test_an_engine_that_rests_sleeps_although_rows_wait(tiny: TinyModels):
    running = await Running(tiny("llama"), batch=2).ready()
    try:
        engine, turns = running.engine, 0
        await engine.hold.take()
        client, _ = running.submit(plan([5, 6], 3))
        await turned(lambda: bool(engine._waiting))
        drop_cancelled = engine._drop_cancelled

        def counted(*args: Any) -> None:
            nonlocal turns
            turns += 1
            drop_cancelled(*args)

        engine._drop_cancelled = counted  # type: ignore[method-assign]
        for _ in range(50):
            await engine.call(lambda: None)
            await asyncio.sleep(0.002)  # in which an engine that spins takes a hundred turns
        assert turns <= 150
        engine.hold.give_back()
        await asyncio.wait_for(client.ended.wait(), PATIENCE_S)
    finally:
        running.stop()


async def test_a_row_that_was_put_back_for_room_ends_before_the_engine_rests(tiny: TinyModels):
    running = await Running(tiny("llama"), batch=2).ready()
    try:
        engine = running.engine
        alone = [(await running.ask(plan([5, place], 60))).text for place in range(2)]
        asked = [running.submit(plan([5, place], 60)) for place in range(2)]
        await turned(lambda: min(row.emitted for _, row in asked) > 3)
        holding = asyncio.create_task(engine.hold.take())
        await turned(lambda: engine.hold.term > 0)

        def shrink() -> None:
            # As rows that grow do to a pool: there is room for the older one alone.
            engine._limits = msgspec.structs.replace(engine._limits, kv_pool_bytes=1)
            engine._changes += 1

        await engine.call(shrink)
        late, _ = running.submit(plan([8, 9], 3))
        await asyncio.wait_for(holding, PATIENCE_S)
        assert [client.text for client, _ in asked] == alone
        assert not late.ended.is_set()
        engine.hold.give_back()
        await asyncio.wait_for(late.ended.wait(), PATIENCE_S)
    finally:
        running.stop()
