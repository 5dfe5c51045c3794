"""The pool over real processes and sockets, with scripted workers that do what real ones do on a bad day."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.tools import sse
from tests.tools.scripted_script import (
    expected_text,
    make_scripted_model,
    read_events,
    write_script,
)
from tests.tools.served import Served, alive, chat_body, gone, serve, until

# One scripted model of this size plans a little more; two of them pass this budget.
WEIGHTS = 400_000_000
BUDGET_FOR_ONE = "1400MB"


def events(models: Path, name: str, kind: str) -> list[dict[str, object]]:
    return [e for e in read_events(models / name) if e["event"] == kind]


async def test_a_cold_request_loads_its_model_and_the_answer_is_its_own(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        assert await served.state("a") == "absent"
        answer = await served.chat("a", "who?")
        assert answer.text == expected_text("a", "who?")
        assert answer.body["model"] == "a"
        assert await served.state("a") == "ready"
        assert (await served.stream("a", "who?")).text == expected_text("a", "who?")


async def test_ten_first_requests_at_once_are_one_load(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", load_s=0.2)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        answers = await asyncio.gather(*(served.chat("a", str(i)) for i in range(10)))
        assert [a.text for a in answers] == [expected_text("a", str(i)) for i in range(10)]
        assert (await served.pool())["counters"]["loads"] == 1
        assert len(events(tmp_path / "m", "a", "started")) == 1


async def test_alternating_requests_in_a_budget_for_one_all_answer_and_never_two_hold_weights(tmp_path: Path):
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "m", name, weights_bytes=WEIGHTS, load_s=0.05)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, budget=BUDGET_FOR_ONE) as served:
        holding: list[set[str]] = []
        done = asyncio.Event()

        async def sample() -> None:
            while not done.is_set():
                pool = await served.pool()
                held = {w["model"] for w in pool["workers"] if w["state"] in ("loading", "ready", "draining")}
                holding.append(held)
                assert pool["reserved_bytes"] <= pool["budget_bytes"]
                await asyncio.sleep(0.02)

        sampler = asyncio.create_task(sample())
        wanted = [("a", "b")[i % 2] for i in range(20)]
        clients = asyncio.Semaphore(8)

        async def ask(i: int) -> str:
            async with clients:
                return (await served.chat(wanted[i], f"q{i}")).text

        texts = await asyncio.gather(*(ask(i) for i in range(20)))
        done.set()
        await sampler
        assert texts == [expected_text(wanted[i], f"q{i}") for i in range(20)]
        assert max(len(held) for held in holding) == 1
        counters = (await served.pool())["counters"]
        assert counters["loads"] == counters["evictions"] + 1  # one load per swap
        assert counters["crashes"] == 0


async def test_a_resident_model_answers_while_another_loads(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "warm")
    make_scripted_model(tmp_path / "m", "cold", load_s=1.0)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        await served.chat("warm")
        loading = asyncio.create_task(served.chat("cold"))
        await served.until_state("cold", "loading")
        assert (await served.chat("warm", "now")).text == expected_text("warm", "now")
        assert await served.state("cold") == "loading"
        assert (await loading).status == 200


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ({"fail_load": "tensor x has the wrong shape"}, "tensor x has the wrong shape"),
        ({"crash_at": "load", "stderr": ["bad weights here"]}, "killed by SIGABRT"),
        ({"crash_at": "load", "stderr": ["bad weights here"]}, "bad weights here"),
        ({"crash_at": "import", "exit_code": 7}, "exit code 7"),
        ({"lie": "ready_without_socket"}, "its socket does not answer"),
        ({"health_fails": True}, "/health answers 503"),
    ],
)
async def test_a_load_failure_tells_every_waiting_client_why(tmp_path: Path, script: dict, reason: str):
    make_scripted_model(tmp_path / "m", "bad", load_s=0.1, **script)
    make_scripted_model(tmp_path / "m", "good")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        answers = await asyncio.gather(*(served.chat("bad", stream=s) for s in (True, False, False)))
        for answer in answers:
            assert (answer.status, answer.code) == (503, "load_failed")
            assert reason in answer.body["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
        await served.until_state("bad", "failed")
        assert reason in (await served.worker("bad"))["reason"]
        assert (await served.chat("good")).status == 200
        assert (await served.chat("bad")).status == 503


@pytest.mark.parametrize("lie", ["garbage", "huge_line", "unknown_type", "loading_after_ready"])
async def test_nonsense_on_the_status_pipe_is_not_believed_and_harms_nothing(tmp_path: Path, lie: str):
    make_scripted_model(tmp_path / "m", "liar", lie=lie, load_s=0.1)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        assert (await served.chat("liar", "q")).text == expected_text("liar", "q")
        assert await served.state("liar") == "ready"


async def test_a_worker_that_is_ready_before_it_was_told_to_load_is_ended(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", weights_bytes=WEIGHTS, drain_s=1.0)
    make_scripted_model(tmp_path / "m", "eager", weights_bytes=WEIGHTS, lie="ready_before_go")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, budget=BUDGET_FOR_ONE) as served:
        await served.chat("a")
        answer = await served.chat("eager")
        assert (answer.status, answer.code) == (503, "load_failed")
        assert "before it was told" in answer.body["error"]["message"]


@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_a_crash_ends_that_models_streams_with_an_error_event_and_no_other(tmp_path: Path, at: str):
    make_scripted_model(tmp_path / "m", "a", crash_at=at, faulty_runs=1, tokens_per_s=50.0, prefill_s=0.1)
    make_scripted_model(tmp_path / "m", "b", tokens=60, tokens_per_s=60.0)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        other = asyncio.create_task(served.stream("b", "q"))
        await served.until_state("b", "ready")
        broken, whole = await asyncio.gather(served.chat("a", stream=True), served.chat("a"))
        assert (whole.status, whole.code) == (502, "worker_crashed")
        # Whether the worker's first chunk was out by then is a matter of microseconds: both are in protocol.
        if broken.status != 200:
            assert at == "prefill"
            assert (broken.status, broken.code) == (502, "worker_crashed")
        else:
            ended = sse.read_chat(broken.body)
            assert ended.error is not None
            assert ended.error["code"] == "worker_crashed"
            assert "SIGABRT" in ended.error["message"]
        assert (await served.chat("a", "again")).text == expected_text("a", "again")
        done = await other
        assert (done.text, done.error) == (expected_text("b", "q", tokens=60), None)
        assert (await served.pool())["counters"]["crashes"] == 1


async def test_half_an_event_of_a_dying_worker_is_dropped(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", half_event_then_crash=True, tokens_per_s=100.0)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        stream = sse.read_chat(await served.stream_bytes("a", "q"))  # strict: half an event would raise
        assert stream.error is not None
        assert stream.error["code"] == "worker_crashed"
        assert expected_text("a", "q").startswith(stream.text)
        assert stream.text


async def test_a_stopped_worker_is_killed_after_the_stall_time_and_the_next_request_is_served(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", tokens=1000, tokens_per_s=50.0)
    make_scripted_model(tmp_path / "m", "b", tokens=300, tokens_per_s=60.0)
    settings = {"pool.stall_timeout": "2s"}
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, settings=settings) as served:
        other = asyncio.create_task(served.stream("b", "q"))
        stuck = asyncio.create_task(served.stream("a", "q"))
        await served.until_state("a", "ready")
        await served.until_state("b", "ready")
        await asyncio.sleep(0.2)
        pid = (await served.worker("a"))["pid"]
        os.kill(pid, signal.SIGSTOP)
        begun = time.monotonic()
        ended = await stuck
        assert time.monotonic() - begun < 2 + 5
        assert ended.error is not None
        assert "no progress" in ended.error["message"]
        await gone([pid])
        assert (await served.stream("a", "again", max_tokens=3)).text.startswith("a:again:0")
        assert (await other).text == expected_text("b", "q", tokens=300)


async def loaded(served: Served, model: str) -> None:
    assert (await served.request("POST", f"/api/models/{model}/load")).status == 202
    await served.until_state(model, "ready")


async def test_a_hung_engine_is_found_although_its_process_lives(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", hang_at="decode", faulty_runs=1, tokens_per_s=50.0)
    async with serve(
        tmp_path, models=tmp_path / "m", scripted=True, settings={"pool.stall_timeout": "2s"}
    ) as served:
        ended = await served.stream("a")
        assert ended.error is not None
        assert "no progress" in ended.error["message"]
        assert (await served.chat("a")).status == 200


async def test_a_hung_worker_is_ended_although_its_client_has_left(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", hang_at="decode", faulty_runs=1, tokens_per_s=50.0)
    settings = {"pool.stall_timeout": "2s"}
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, settings=settings) as served:
        await loaded(served, "a")
        with pytest.raises(TimeoutError):
            # Long enough for a heartbeat of the worker that hangs.
            await asyncio.wait_for(served.stream("a"), 1.5)
        pid = (await served.worker("a"))["pid"]
        await gone([pid])
        assert (await served.chat("a")).status == 200


async def test_a_hung_worker_that_is_unloaded_is_not_waited_for_as_long_as_a_drain(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", hang_at="decode", faulty_runs=1, tokens_per_s=50.0)
    settings = {"pool.stall_timeout": "2s", "pool.drain_timeout": "60s"}
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, settings=settings) as served:
        await loaded(served, "a")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(served.stream("a"), 1.2)
        pid = (await served.worker("a"))["pid"]
        await served.request("POST", "/api/models/a/unload")
        await gone([pid])
        assert "crash a: stalled: no progress for 2.0 s" in served.log()
        # Its socket's end is heard of before its own, or after.
        await until(lambda: "not on disk yet are lost (1 record waited to be written)" in served.log())


async def test_a_load_without_progress_is_given_up(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", hang_at="load")
    async with serve(
        tmp_path, models=tmp_path / "m", scripted=True, settings={"pool.load_timeout": "1s"}
    ) as served:
        answer = await served.chat("a")
        assert (answer.status, answer.code) == (503, "load_failed")
        assert "no loading progress" in answer.body["error"]["message"]
        await until(lambda: served.worker_pids() == [])


async def test_a_worker_that_ignores_sigterm_is_killed(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", ignore_sigterm=True)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        await served.chat("a")
        pid = (await served.worker("a"))["pid"]
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")
        assert not alive([pid])


async def test_a_drain_that_never_ends_is_cut_at_its_time_out(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", never_drain=True)
    async with serve(
        tmp_path, models=tmp_path / "m", scripted=True, settings={"pool.drain_timeout": "0.2s"}
    ) as served:
        await served.chat("a")
        await served.request("POST", "/api/models/a/unload")
        await served.until_state("a", "absent")


async def test_a_client_that_leaves_the_queue_loads_nothing_and_evicts_nobody(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", weights_bytes=WEIGHTS, tokens=250, tokens_per_s=100.0)
    make_scripted_model(tmp_path / "m", "b", weights_bytes=WEIGHTS)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, budget=BUDGET_FOR_ONE) as served:
        busy = asyncio.create_task(served.stream("a"))
        await served.until_state("a", "ready")
        for stream in (True, False):
            leaver = asyncio.create_task(served.chat("b", stream=stream))
            await until_async(lambda: queued(served, "b"))
            leaver.cancel()
            await until_async(lambda: not_queued(served))
        assert (await busy).finish == "stop"
        await asyncio.sleep(0.1)
        assert await served.state("a") == "ready"
        assert events(tmp_path / "m", "b", "started") == []


async def queued(served, model: str) -> bool:
    return [q["model"] for q in (await served.pool())["queue"]] == [model]


async def not_queued(served) -> bool:
    return (await served.pool())["queue"] == []


async def until_async(true, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not await true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_during_the_load_stops_the_load(tmp_path: Path, stream: bool):
    make_scripted_model(tmp_path / "m", "a", load_s=30.0, load_lines=100)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        leaver = asyncio.create_task(served.chat("a", stream=stream))
        await served.until_state("a", "loading")
        [pid] = served.worker_pids()
        leaver.cancel()
        await gone([pid])
        await served.until_state("a", "absent")
        assert (await served.pool())["counters"]["crashes"] == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("at", ["prefill", "decode"])
async def test_a_client_that_leaves_stops_the_workers_tokens(tmp_path: Path, stream: bool, at: str):
    slow = {"prefill_s": 30.0} if at == "prefill" else {"tokens": 5000, "tokens_per_s": 100.0}
    make_scripted_model(tmp_path / "m", "a", **slow)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        leaver = asyncio.create_task(served.chat("a", stream=stream))
        await served.until_state("a", "ready")
        await until(lambda: bool(events(tmp_path / "m", "a", "request")))
        await asyncio.sleep(0.1)
        leaver.cancel()
        await until(lambda: bool(events(tmp_path / "m", "a", "cancelled")), 1.0)
        assert (await served.worker("a"))["active"] == 0
        assert (await served.chat("b")).status == 404  # and the parent goes on


async def test_a_hundred_clients_that_left_leave_every_row_free(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", tokens=2000, tokens_per_s=200.0)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        await loaded(served, "a")
        for _ in range(10):
            leavers = [asyncio.create_task(served.chat("a", stream=True)) for _ in range(10)]
            await asyncio.sleep(0.05)
            for leaver in leavers:
                leaver.cancel()
        await until_async(lambda: idle(served, "a"))
        begun = await asyncio.gather(*(served.stream("a", max_tokens=2) for _ in range(8)))
        assert [s.finish for s in begun] == ["length"] * 8


async def idle(served, model: str) -> bool:
    worker = await served.worker(model)
    return worker is not None and worker["active"] == 0 and worker["queued"] == 0


async def test_over_the_queue_limit_clients_get_429_before_any_stream_begins(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", tokens=6000, tokens_per_s=100.0)
    config = '[pool]\nqueue_limit = 2\n[models."a"]\nbatch = 1\n'
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, config=config) as served:
        running = asyncio.create_task(served.stream("a"))
        await served.until_state("a", "ready")
        waiting = [asyncio.create_task(served.chat("a", stream=True)) for _ in range(2)]
        await until_async(lambda: two_wait(served))
        refused = await served.chat("a", stream=True)
        assert (refused.status, refused.code, refused.headers["retry-after"]) == (429, "queue_full", "5")
        for task in (*waiting, running):
            task.cancel()


async def two_wait(served) -> bool:
    return len((await served.pool())["queue"]) == 2


async def test_a_request_that_waits_too_long_is_told_what_for(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", weights_bytes=WEIGHTS, tokens=500, tokens_per_s=50.0)
    make_scripted_model(tmp_path / "m", "b", weights_bytes=WEIGHTS)
    settings = {"pool.queue_timeout": "0.5s"}
    async with serve(
        tmp_path, models=tmp_path / "m", scripted=True, budget=BUDGET_FOR_ONE, settings=settings
    ) as served:
        busy = asyncio.create_task(served.stream("a"))
        await served.until_state("a", "ready")
        late = await served.chat("b")
        assert (late.status, late.code) == (503, "queue_timeout")
        assert "other models hold the memory" in late.body["error"]["message"]
        assert "retry-after" in late.headers
        busy.cancel()


async def test_unload_lets_the_stream_end_and_forced_unload_ends_it_with_an_error(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", tokens=40, tokens_per_s=50.0)
    make_scripted_model(tmp_path / "m", "endless", tokens=6000, tokens_per_s=50.0)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        stream = asyncio.create_task(served.stream("a", "q"))
        await served.until_state("a", "ready")
        await asyncio.sleep(0.1)
        answer = await served.request("POST", "/api/models/a/unload", {"force": False})
        assert (answer.status, answer.body["id"]) == (202, "a")
        assert (await stream).text == expected_text("a", "q", tokens=40)
        await served.until_state("a", "absent")

        stream = asyncio.create_task(served.stream("endless", "q"))
        await served.until_state("endless", "ready")
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        await served.request("POST", "/api/models/endless/unload", {"force": True})
        ended = await stream
        assert time.monotonic() - begun < 2
        assert ended.error is not None
        assert "unloaded by request" in ended.error["message"]
        assert (await served.pool())["counters"]["crashes"] == 0


async def test_load_pin_and_unpin_by_name(tmp_path: Path):
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "m", name, weights_bytes=WEIGHTS)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, budget=BUDGET_FOR_ONE) as served:
        assert (await served.request("POST", "/api/models/a/load")).status == 202
        await served.until_state("a", "ready")
        assert (await served.request("POST", "/api/models/a/pin")).body["pinned"] is True
        refused = await served.chat("b")
        assert (refused.status, refused.code) == (400, "model_too_large")
        assert "unpin" in refused.body["error"]["message"]
        await served.request("POST", "/api/models/a/unpin")
        assert (await served.chat("b")).status == 200


async def test_a_models_files_that_change_are_loaded_again_after_a_failure(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", fail_load="broken")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        assert (await served.chat("a")).code == "load_failed"
        write_script(tmp_path / "m" / "a")
        config = tmp_path / "m" / "a" / "config.json"
        config.write_text(config.read_text() + "\n")
        await asyncio.sleep(1.1)  # a request within a second of the last one does not look at the files
        assert (await served.chat("a")).status == 200


@pytest.mark.parametrize("when", ["idle", "loading", "streaming", "stopped"])
async def test_kill_9_of_the_parent_leaves_no_worker_and_the_next_one_serves_the_same_port(
    tmp_path: Path, when: str
):
    make_scripted_model(
        tmp_path / "m", "a", tokens=3000, tokens_per_s=100.0, load_s=20.0 if when == "loading" else 0.0
    )
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        port = served.port
        request = asyncio.create_task(served.chat("a", stream=True, max_tokens=2 if when == "idle" else 3000))
        await served.until_state("a", "loading" if when == "loading" else "ready")
        if when == "idle":
            await request
        pids = served.worker_pids()
        assert len(pids) == 1
        if when == "stopped":
            os.kill(pids[0], signal.SIGSTOP)  # it can't see its tether close
        served.process.kill()
        served.process.wait()  # its children are nobody's now
        await asyncio.gather(request, return_exceptions=True)
        if when != "stopped":
            await gone(pids)
    write_script(tmp_path / "m" / "a")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, port=port) as served:
        await gone(pids)
        assert (await served.chat("a", "q")).text == expected_text("a", "q")


async def test_sigterm_lets_streams_end_and_leaves_nothing(tmp_path: Path):
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "m", name, tokens=50, tokens_per_s=50.0)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        streams = [asyncio.create_task(served.stream(name, "q")) for name in ("a", "b")]
        for name in ("a", "b"):
            await served.until_state(name, "ready")
        await asyncio.sleep(0.2)
        pids = served.worker_pids()
        assert await served.down() == 0
        for name, stream in zip(("a", "b"), streams, strict=True):
            assert (await stream).text == expected_text(name, "q", tokens=50)
        assert not alive(pids)
        assert not (served.home / "up.json").exists()


async def test_a_stream_that_outlives_the_drain_ends_in_protocol_at_shutdown(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", tokens=5000, tokens_per_s=50.0)
    async with serve(
        tmp_path, models=tmp_path / "m", scripted=True, settings={"pool.drain_timeout": "0.5s"}
    ) as served:
        stream = asyncio.create_task(served.stream("a"))
        await served.until_state("a", "ready")
        await asyncio.sleep(0.2)
        assert await served.down() == 0
        ended = await stream
        assert ended.error is not None
        assert ended.error["code"] == "shutting_down"


async def test_a_second_signal_stops_now(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", tokens=50_000, tokens_per_s=50.0)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        stream = asyncio.create_task(served.stream("a"))
        await served.until_state("a", "ready")
        await asyncio.sleep(0.2)
        served.process.send_signal(signal.SIGINT)
        await until(lambda: "SIGINT: stopping" in served.log())
        begun = time.monotonic()
        assert await served.down(signal.SIGINT) == 0
        assert time.monotonic() - begun < 8
        assert (await stream).error is not None


async def test_two_parents_of_one_home_are_refused(tmp_path: Path):
    (tmp_path / "m").mkdir()
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        with pytest.raises(AssertionError, match="it left with 1"):
            async with serve(tmp_path, models=tmp_path / "m", scripted=True):
                pass
        assert f"pid {served.process.pid}" in served.log()
        assert "--home" in served.log()


async def test_three_crashes_in_a_minute_cool_down(tmp_path: Path):
    make_scripted_model(tmp_path / "m", "a", crash_at="decode")
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        codes = [(await served.chat("a")).code for _ in range(4)]
        assert codes == ["worker_crashed"] * 3 + ["load_failed"]
        refused = await served.request("POST", "/v1/chat/completions", chat_body("a"))
        assert "crashed 3 times" in refused.body["error"]["message"]
        assert 25 <= int(refused.headers["retry-after"]) <= 30


SPARE = {"pool.spare_worker": "true"}


async def test_a_switch_takes_the_spare_and_another_one_is_started_afterwards(tmp_path: Path):
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "m", name, tokens=20, tokens_per_s=40.0)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, settings=SPARE) as served:
        await until(lambda: len(served.worker_pids()) == 1)
        [spare] = served.worker_pids()
        assert (await served.pool())["workers"] == []
        stream = asyncio.create_task(served.stream("a", "q"))
        await served.until_state("a", "ready")
        assert (await served.worker("a"))["pid"] == spare
        assert (await stream).text == expected_text("a", "q", tokens=20)
        await until(lambda: len(served.worker_pids()) == 2)
        [next_spare] = [pid for pid in served.worker_pids() if pid != spare]
        os.kill(next_spare, signal.SIGKILL)  # nobody notices
        assert (await served.chat("b", "q")).text == expected_text("b", "q", tokens=20)
        assert (await served.pool())["counters"]["crashes"] == 0


async def test_kill_9_of_the_parent_takes_its_spare_with_it(tmp_path: Path):
    (tmp_path / "m").mkdir()
    async with serve(tmp_path, models=tmp_path / "m", scripted=True, settings=SPARE) as served:
        await until(lambda: len(served.worker_pids()) == 1)
        pids = served.worker_pids()
        served.process.kill()
        await gone(pids)


async def test_a_run_folder_that_was_cleared_away_is_made_again_and_no_process_is_lost(tmp_path: Path):
    for name in ("a", "b"):
        make_scripted_model(tmp_path / "m", name)
    async with serve(tmp_path, models=tmp_path / "m", scripted=True) as served:
        await served.chat("a")
        shutil.rmtree(served.home / "run")
        assert (await served.chat("b", "q")).text == expected_text("b", "q")
        assert len(served.worker_pids()) == 2
        # The kept connection still leads to a's worker; another one can't be made, and that ends it.
        answers = await asyncio.gather(*(served.chat("a", str(i)) for i in range(4)))
        assert {a.status for a in answers} <= {200, 502}
        assert (await served.chat("a", "q")).text == expected_text("a", "q")
        pool = await served.pool()
        assert sorted(w["pid"] for w in pool["workers"]) == sorted(served.worker_pids())
