"""Rows that run together: no mixing, no waiting for the gone, clean drains."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tools import tiny_models
from tests.tools.tiny_fixture import TinyModels
from tests.tools.worker_process import WorkerProcess, chat_body

# A mark is acted on between steps and chunks; a chunk is at most 0.4 s.
FREED_WITHIN_S = 10.0

# Fixed before the engine that must answer them alike.
PROMPTS: list[str] = json.loads((Path(__file__).parents[1] / "data" / "fifty_prompts.json").read_text())


def eventually(check: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.01)
    return check()


def settings(place: int) -> dict[str, Any]:
    """Half greedy, half sampled, lengths mixed."""
    if place % 2:
        return {"temperature": 1.0, "seed": place, "top_p": 0.9, "max_tokens": 20 + 7 * (place % 12)}
    return {"temperature": 0, "max_tokens": 20 + 7 * (place % 12)}


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_every_answer_together_is_its_answer_alone(tiny: TinyModels, kind: tiny_models.Kind) -> None:
    with WorkerProcess(tiny(kind), batch=4, prefill_chunk=32).ready() as worker:
        alone = [worker.text(prompt, **settings(place)) for place, prompt in enumerate(PROMPTS)]
        assert len(set(alone)) == len(alone)
        for spread_s in (0.0, 0.01):

            def late(place: int, spread_s: float = spread_s) -> str:
                time.sleep(place * spread_s)
                return worker.text(PROMPTS[place], **settings(place))

            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                together = list(pool.map(late, range(len(PROMPTS))))
            assert together == alone


def test_a_row_that_leaves_changes_nothing_for_the_others(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama"), batch=4).ready() as worker:
        alone = worker.text("hello", temperature=1, seed=9, max_tokens=400)
        answers: list[str] = []
        thread = threading.Thread(
            target=lambda: answers.append(worker.text("hello", temperature=1, seed=9, max_tokens=400))
        )
        thread.start()
        for place in range(6):
            leaving = worker.stream(PROMPTS[place], temperature=1, seed=place, max_tokens=1000)
            next(leaving)
            leaving.close()
        thread.join()
        assert answers == [alone]


def leave(worker: WorkerProcess, after: Callable[[], bool], **fields: Any) -> None:
    """Send a request and close the connection once `after` holds."""
    connection = worker.connection()
    connection.request("POST", "/v1/chat/completions", json.dumps(chat_body(**fields)).encode())
    assert eventually(after, 60)
    connection.close()


# Never an eos before the limit: stop at nothing readable, sample hot.
LONG: dict[str, Any] = {"max_tokens": 3500, "temperature": 2, "seed": 2}


def tokens_above(worker: WorkerProcess, count: int) -> bool:
    return bool(worker.stats()["tokens"] > count)


def test_a_client_that_leaves_while_decoding_frees_its_row_at_once(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("sliding"), context=4000).ready() as worker:
        process = psutil.Process(worker.process.pid)
        for stream in (False, True):
            before = worker.stats()
            leave(
                worker,
                partial(tokens_above, worker, before["tokens"] + 5),
                content="hello",
                stream=stream,
                **LONG,
            )
            assert eventually(lambda: worker.stats()["rows"] == 0, FREED_WITHIN_S)
            stood = worker.stats()
            assert stood["cancelled"] == before["cancelled"] + 1
            cpu = process.cpu_times()
            time.sleep(0.5)
            now = process.cpu_times()
            assert now.user + now.system - cpu.user - cpu.system <= 0.05
            assert worker.stats()["tokens"] == stood["tokens"] < 3500


def test_a_client_that_leaves_while_prefilling_frees_its_row_at_once(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("sliding"), context=120_000, prefill_chunk=16).ready() as worker:
        leave(worker, lambda: worker.stats()["progress"] > 5, content="x" * 100_000, max_tokens=5)
        assert eventually(lambda: worker.stats()["rows"] == 0, FREED_WITHIN_S)
        stood = worker.stats()
        assert (stood["cancelled"], stood["tokens"]) == (1, 0)
        assert stood["progress"] < 100_000 / 16
        time.sleep(0.3)
        assert worker.stats()["progress"] == stood["progress"]


def test_a_client_that_leaves_while_queued_is_never_run(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("sliding"), context=4000, batch=1).ready() as worker:
        running = worker.stream("hello", **LONG)
        next(running), next(running)
        leave(worker, lambda: worker.stats()["waiting"] == 1, content="b", max_tokens=5)
        assert eventually(lambda: worker.stats()["waiting"] == 0, FREED_WITHIN_S)
        assert worker.stats()["cancelled"] == 1
        running.close()
        assert eventually(lambda: worker.stats()["rows"] == 0, FREED_WITHIN_S)


def test_after_many_disconnects_the_batch_still_takes_as_many(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama"), context=4000, batch=3).ready() as worker:
        for place in range(30):
            stream = worker.stream("hello", temperature=2, seed=place, max_tokens=3000)
            next(stream)
            stream.close()
        assert eventually(lambda: worker.stats()["rows"] == 0, FREED_WITHIN_S)
        streams = [worker.stream("hello", **LONG) for _ in range(3)]
        for stream in streams:
            next(stream), next(stream)
        assert worker.stats()["rows"] == 3
        for stream in streams:
            stream.close()


def test_a_row_that_would_pass_the_kv_pool_waits_unless_it_is_alone(tiny: TinyModels) -> None:
    # Two layers, two KV heads of 16, keys and values in float32: 512 bytes a token; room for 1,024 tokens.
    with WorkerProcess(
        tiny("llama"), context=4000, kv_pool_bytes=512 * 1024, temperature=2
    ).ready() as worker:
        alone = worker.stream("hello", max_tokens=3000, seed=2)
        next(alone), next(alone)
        waiting = ThreadPoolExecutor(1).submit(worker.chat, "b", max_tokens=20)
        assert eventually(lambda: worker.stats()["waiting"] == 1, 5)
        assert worker.stats()["rows"] == 1
        alone.close()
        assert waiting.result(10)["usage"]["completion_tokens"] <= 20


def test_a_short_request_does_not_wait_for_a_long_prefill(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("sliding"), context=120_000, prefill_chunk=16).ready() as worker:
        long = ThreadPoolExecutor(1).submit(worker.chat, "x" * 30_000, max_tokens=2, temperature=0)
        assert eventually(lambda: worker.stats()["progress"] > 5, 10)
        worker.chat("hello", max_tokens=5, temperature=0)
        assert not long.done()
        worker.process.kill()
        with pytest.raises(OSError):
            long.result(10)


def test_a_drain_refuses_new_requests_and_lets_running_ones_end(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("sliding"), context=2000).ready() as worker:
        running = ThreadPoolExecutor(1).submit(worker.chat, "hello", max_tokens=300, temperature=2, seed=2)
        assert eventually(lambda: worker.stats()["tokens"] > 0, 10)
        drain = ThreadPoolExecutor(1).submit(worker.request, "POST", "/control/drain?timeout_s=30")
        assert eventually(lambda: worker.request("GET", "/health")[0] == 503, 5)
        status, body, headers = worker.request("POST", "/v1/chat/completions", chat_body("b"))
        assert (status, body["error"]["code"]) == (503, "shutting_down")
        assert headers["Retry-After"] == "1"
        assert running.result(30)["usage"]["completion_tokens"] > 1
        status, report, _ = drain.result(30)
        assert (status, report["durable"], report["pending"]) == (200, True, 0)


def test_a_drain_gives_up_at_its_time_out(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("sliding"), context=4000).ready() as worker:
        running = worker.stream("hello", **LONG)
        next(running), next(running)
        status, report, _ = worker.request("POST", "/control/drain?timeout_s=0.1")
        assert (status, report["pending"]) == (200, 1)
        running.close()


def test_a_wrong_drain_time_out_is_refused(tiny: TinyModels) -> None:
    with WorkerProcess(tiny("llama")).ready() as worker:
        for wrong in ("soon", "-1", "nan", "inf"):
            status, body, _ = worker.request("POST", f"/control/drain?timeout_s={wrong}")
            assert (status, body["error"]["param"]) == (400, "timeout_s")
        assert worker.request("GET", "/health")[0] == 200
