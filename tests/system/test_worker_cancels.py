"""Clients that leave at any moment: nothing of theirs stays, nothing of the others' changes."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from tests.tools.tiny_fixture import TinyModels
from tests.tools.worker_process import WorkerProcess, chat_body, streamed_text

CANCELS = 200
LEAVERS = 4
STREAMS = 4
# What one more leaver of a steady state may still add: fragments of the allocator, never a row's worth.
GROWTH_BYTES = 48 << 20

FORM: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "f",
        "schema": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 200},
        "strict": True,
    },
}


def leaver(place: int, rng: random.Random) -> dict[str, Any]:
    """The body of a request of some kind, none of which would end soon by itself."""
    fields: dict[str, Any] = {"stream": rng.random() < 0.5, "max_tokens": 1500, "seed": place}
    fields |= rng.choice([
        {}, {"response_format": FORM}, {"n": 3}, {"logprobs": True, "top_logprobs": 3},
        {"presence_penalty": 0.5}, {"xtc_probability": 0.5}, {"stop": ["zzzz"]},
        {"response_format": {"type": "json_object"}, "n": 2},
    ])  # fmt: skip
    return chat_body("word " * rng.choice([1, 5, 60, 250]), **fields)


def test_two_hundred_leavers_change_nothing_and_leave_nothing(tiny: TinyModels) -> None:
    rng = random.Random(11)
    asks: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": place, "max_tokens": 1200, "logit_bias": {"258": -100}}
        for place in range(STREAMS)
    ]
    with WorkerProcess(tiny("llama"), context=2048, batch=8, prefill_chunk=64).ready() as worker:
        alone = [worker.text("stay", **fields) for fields in asks]
        worker.chat("x", response_format=FORM, max_tokens=3)
        leaving = threading.Event()
        streamed: list[list[str]] = [[] for _ in asks]

        def stay(place: int) -> None:
            while not leaving.is_set():
                streamed[place].append(streamed_text(list(worker.stream("stay", **asks[place]))))

        def leave(place: int) -> None:
            connection = worker.connection()
            body = json.dumps(leaver(place, rng)).encode()
            connection.request("POST", "/v1/chat/completions", body)
            time.sleep(rng.random() ** 3 * 0.4)
            connection.close()

        with ThreadPoolExecutor(STREAMS + LEAVERS) as pool:
            staying = [pool.submit(stay, place) for place in range(STREAMS)]
            list(pool.map(leave, range(CANCELS // 4)))
            before = psutil.Process(worker.process.pid).memory_info().rss
            list(pool.map(leave, range(CANCELS // 4, CANCELS)))
            leaving.set()
            for future in staying:
                future.result()
        for place, texts in enumerate(streamed):
            assert texts
            assert set(texts) == {alone[place]}
        deadline = time.monotonic() + 60
        while (stats := worker.stats())["rows"] or stats["waiting"]:
            assert time.monotonic() < deadline, stats
            time.sleep(0.02)
        assert stats["open_grammars"] == 0
        assert stats["kv_used_bytes"] == 0
        assert stats["errors"] == 0
        assert psutil.Process(worker.process.pid).memory_info().rss - before < GROWTH_BYTES
