"""The stand-in keeps the protocol it stands in for: spawned with real pipes, asked over a real socket."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tokenizers import Tokenizer

from mlxpool.shared import checkpoint, memory
from mlxpool.shared.control import (
    HEADER_ASKED_MODEL,
    HEADER_CREATED,
    HEADER_REQUEST_ID,
    HEADER_RESPONSE_ID,
    CacheSummary,
    DrainReport,
    Failed,
    Imported,
    Loading,
    Ready,
    Status,
)
from mlxpool.shared.model_facts import model_facts
from tests.tools import sse
from tests.tools.scripted_script import expected_text, make_scripted_model, read_events, write_script
from tests.tools.spawned import PATIENCE_S, Spawned, chat_body, eventually

Spawn = Callable[..., Spawned]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Makes a scripted model `m` and a worker of it."""
    spawned: list[Spawned] = []

    def make(*, by_name: bool = True, **script: Any) -> Spawned:
        folder = tmp_path / "m"
        if not folder.exists():
            make_scripted_model(tmp_path, "m", **script)
        spawned.append(Spawned(folder, tmp_path / f"{len(spawned)}.sock", by_name=by_name))
        return spawned[-1]

    yield make
    for worker in spawned:
        worker.close()


def test_a_healthy_start_says_imported_loading_ready_and_serves(spawn: Spawn) -> None:
    worker = spawn(load_lines=2, weights_bytes=1_000_000)
    assert worker.status() == Imported(backend="scripted")
    worker.go()
    assert worker.status() == Loading(0, 1_000_000 + 8 + header_bytes(worker.folder))
    assert [type(worker.status()) for _ in range(3)] == [Loading, Loading, Ready]
    assert worker.ask("GET", "/health")[::2] == (200, b'{"status":"ok"}')
    assert worker.socket_path.stat().st_mode & 0o777 == 0o600
    assert worker.events() == ["started", "go", "loading", "ready"]


def header_bytes(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def test_nothing_is_loaded_before_go(spawn: Spawn) -> None:
    worker = spawn()
    assert worker.status() == Imported(backend="scripted")
    assert worker.events() == ["started"]
    assert not worker.socket_path.exists()


def test_the_end_of_the_tether_is_the_end_of_the_worker(spawn: Spawn) -> None:
    worker = spawn(hang_at="load", ignore_sigterm=True)
    assert worker.status() == Imported(backend="scripted")
    worker.go()
    worker.hang_up()
    assert worker.process.wait(PATIENCE_S) == 0
    assert read_events(worker.folder)[-1]["why"] == "tether"


def test_a_whole_answer_has_the_text_the_script_foretells(spawn: Spawn) -> None:
    worker = spawn(tokens=5).ready()
    asked = {HEADER_ASKED_MODEL: "alias", HEADER_REQUEST_ID: "r1"}
    body = chat_body("How {i} are you?")
    status, headers, answer = worker.ask("POST", "/v1/chat/completions", body, asked)
    message = json.loads(answer)
    assert status == 200
    assert headers["x-request-id"] == "r1"
    assert message["model"] == "alias"
    assert message["choices"][0]["message"]["content"] == expected_text("m", "How {i} are you?", 5)
    assert message["choices"][0]["message"]["content"].startswith(
        "m:How {i} are you?:0 m:How {i} are you?:1 "
    )
    assert message["choices"][0]["finish_reason"] == "stop"
    assert message["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("events_per_write", [1, 3])
def test_a_stream_equals_the_whole_answer(spawn: Spawn, events_per_write: int) -> None:
    worker = spawn(tokens=8, events_per_write=events_per_write).ready()
    status, headers, body = worker.chat("hi", stream=True, max_tokens=7)
    chunks = sse.read_chat(body)
    assert (status, headers["content-type"]) == (200, "text/event-stream")
    assert chunks.roles == ["assistant"]
    assert chunks.text == expected_text("m", "hi", 7)
    assert chunks.finish == "length"
    assert chunks.usage == json.loads(worker.chat("hi", max_tokens=7)[2])["usage"]


def test_usage_comes_apart_when_asked_for(spawn: Spawn) -> None:
    worker = spawn(tokens=2).ready()
    body = worker.chat("hi", stream=True, stream_options={"include_usage": True})[2]
    *_, finish, usage = [event.json() for event in sse.read(body) if event.data != "[DONE]"]
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in finish
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2


def test_a_stream_has_the_id_and_the_time_that_the_parent_gave_it(spawn: Spawn) -> None:
    worker = spawn(tokens=1).ready()
    given = {HEADER_RESPONSE_ID: "chatcmpl-parent", HEADER_CREATED: "1700000000"}
    body = worker.ask("POST", "/v1/chat/completions", chat_body("hi", stream=True), given)[2]
    chunks = sse.read_chat(body)
    assert chunks.roles == ["assistant"]
    assert (chunks.ids, chunks.created) == ({"chatcmpl-parent"}, {1700000000})


def test_a_long_prefill_is_filled_with_empty_deltas(spawn: Spawn) -> None:
    worker = spawn(prefill_s=0.3, keepalive_s=0.05, tokens=1).ready()
    first, *rest = [event.json() for event in sse.read(worker.chat("hi", stream=True)[2])[:-1]]
    silent = [chunk for chunk in rest if chunk["choices"][0]["delta"] == {}][:-1]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert 1 <= len(silent) <= 6
    assert {chunk["id"] for chunk in rest} == {first["id"]}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_row(spawn: Spawn, stream: bool) -> None:
    worker = spawn(tokens=10**9, tokens_per_s=500).ready()
    client = worker.send("POST", "/v1/chat/completions", chat_body("hi", stream=stream))
    eventually(lambda: worker.stats().tokens > 5)
    client.close()
    eventually(lambda: "cancelled" in worker.events())
    stats = worker.stats()
    assert (stats.rows, stats.cancelled) == (0, 1)
    assert worker.stats().tokens == stats.tokens


def test_a_client_that_leaves_while_it_does_not_read_stops_its_row(spawn: Spawn) -> None:
    worker = spawn(tokens=10**9, events_per_write=100).ready()
    client = worker.send("POST", "/v1/chat/completions", chat_body("hi", stream=True))
    assert worker.heartbeat(lambda beat: beat.tokens > 0 and beat.pending == 0).progress > 1
    client.close()
    eventually(lambda: worker.stats().rows == 0)


def test_bad_requests_are_refused_in_the_protocols_shape(spawn: Spawn) -> None:
    worker = spawn().ready()
    status, _, body = worker.ask("POST", "/v1/chat/completions", b"{")
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_request")
    status, _, body = worker.ask("GET", "/nowhere")
    assert (status, json.loads(body)["error"]["message"]) == (404, "GET /nowhere: no such path on a worker")
    assert worker.stats().errors == 2


def test_a_scripted_status_is_an_error_envelope(spawn: Spawn) -> None:
    worker = spawn(status=503, fault_on="please fail").ready()
    status, _, body = worker.chat("please fail")
    assert (status, json.loads(body)["error"]["code"]) == (503, "load_failed")
    assert worker.chat("please do not")[0] == 200


def test_a_drain_lets_rows_end_and_admits_no_more(spawn: Spawn) -> None:
    worker = spawn(tokens=20, tokens_per_s=40).ready()
    running = worker.send("POST", "/v1/chat/completions", chat_body("one"))
    eventually(lambda: worker.stats().rows == 1)
    drain = worker.send("POST", "/control/drain?timeout_s=15")
    eventually(lambda: "drain" in worker.events())
    assert worker.chat("two")[0] == 503
    assert worker.ask("GET", "/health")[0] == 503
    report = msgspec.json.decode(sse.read_answer(drain)[2], type=DrainReport)
    assert report.durable
    text = json.loads(sse.read_answer(running)[2])["choices"][0]["message"]["content"]
    assert text == expected_text("m", "one", 20)
    assert [event for event in worker.events() if event in ("done", "drained")] == ["done", "drained"]


def test_a_drain_gives_up_at_its_time_out(spawn: Spawn) -> None:
    worker = spawn(tokens=10**9, tokens_per_s=50).ready()
    running = worker.send("POST", "/v1/chat/completions", chat_body("one"))
    eventually(lambda: worker.stats().rows == 1)
    assert worker.ask("POST", "/control/drain?timeout_s=0.05")[0] == 200
    assert read_events(worker.folder)[-1]["rows"] == 1
    running.close()


def test_sigterm_is_a_clean_exit_and_sigint_is_none(spawn: Spawn) -> None:
    worker = spawn().ready()
    worker.process.send_signal(signal.SIGINT)
    assert worker.ask("GET", "/health")[0] == 200
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(PATIENCE_S) == 0
    assert worker.events()[-2:] == ["term", "exit"]
    assert not worker.socket_path.exists()


CACHE = {"ram_bytes": 3_000_000, "folder": "/kv", "ssd_budget_bytes": 10**9}


def test_prompts_are_counted_and_told_with_each_heartbeat(spawn: Spawn) -> None:
    worker = spawn(cache_says={"restores": 2}).ready(cache=CACHE)
    for prompt in ("one two", "three", "one two"):
        assert worker.chat(prompt)[0] == 200
    beat = worker.heartbeat(lambda beat: beat.cache is not None and beat.cache.misses == 2)
    assert beat.cache == CacheSummary(
        bytes=2_000_000, hits=1, misses=2, cached_tokens=2, pending=2, restores=2
    )
    report = msgspec.json.decode(worker.ask("POST", "/control/flush?timeout_s=1")[2], type=DrainReport)
    assert (report.durable, report.flushed, report.missing) == (True, 2, 0)
    stats = json.loads(worker.ask("GET", "/stats")[2])
    assert (stats["ssd_cache"]["entries"], stats["ssd_cache"]["pending"]) == (2, 0)


def test_it_takes_another_share_of_memory(spawn: Spawn) -> None:
    worker = spawn().ready(cache=CACHE)
    for prompt in ("one", "two"):
        worker.chat(prompt)
    assert worker.ask("POST", "/control/cache", b'{"ram_bytes":1000000}')[0] == 200
    held = json.loads(worker.ask("GET", "/stats")[2])["prompt_cache"]
    assert (held["bytes"], held["max_bytes"]) == (1_000_000, 1_000_000)
    assert [e["ram_bytes"] for e in read_events(worker.folder) if e["event"] in ("go", "shared")] == [
        3_000_000,
        1_000_000,
    ]


def test_a_drain_can_leave_something_unwritten(spawn: Spawn) -> None:
    worker = spawn(cache_missing=1).ready(cache=CACHE)
    for prompt in ("one", "two"):
        worker.chat(prompt)
    report = msgspec.json.decode(worker.ask("POST", "/control/drain?timeout_s=1")[2], type=DrainReport)
    assert (report.durable, report.flushed, report.missing, report.failed) == (False, 1, 1, 1)


def test_sigterm_can_be_ignored(spawn: Spawn) -> None:
    worker = spawn(ignore_sigterm=True).ready()
    worker.process.send_signal(signal.SIGTERM)
    eventually(lambda: "term" in worker.events())
    assert worker.ask("GET", "/health")[0] == 200


def test_a_failed_load_says_why_and_exits_3(spawn: Spawn) -> None:
    worker = spawn(fail_load="model.safetensors: truncated", load_progress=False, stderr=["line one"])
    worker.status()
    worker.go()
    assert worker.status() == Failed(reason="model.safetensors: truncated")
    assert worker.process.wait(PATIENCE_S) == 3
    assert worker.process.stderr is not None
    assert worker.process.stderr.read() == b"line one\n"


@pytest.mark.parametrize(
    ("moment", "last_event"), [("import", "started"), ("load", "loading"), ("ready", "ready")]
)
def test_it_crashes_in_its_life_where_the_script_says(spawn: Spawn, moment: str, last_event: str) -> None:
    worker = spawn(crash_at=moment, crash_signal="SIGSEGV")
    worker.go()
    assert worker.process.wait(PATIENCE_S) == -signal.SIGSEGV
    assert worker.events()[-2:] == [last_event, "exit"]


def test_it_crashes_in_a_request_where_the_script_says(spawn: Spawn) -> None:
    worker = spawn(crash_at="decode", exit_code=7, fault_after_tokens=2, fault_on="now").ready()
    assert worker.chat("later")[0] == 200
    body = sse.read_broken(worker.send("POST", "/v1/chat/completions", chat_body("now", stream=True)))
    assert worker.process.wait(PATIENCE_S) == 7
    texts = [event.json()["choices"][0]["delta"].get("content") for event in sse.read(body, whole=False)]
    assert texts == ["", "m:now:0 ", "m:now:1 "]


def test_half_an_event_is_sent_before_the_crash(spawn: Spawn) -> None:
    worker = spawn(half_event_then_crash=True, crash_signal=9, fault_after_tokens=1).ready()
    body = sse.read_broken(worker.send("POST", "/v1/chat/completions", chat_body("hi", stream=True)))
    assert worker.process.wait(PATIENCE_S) == -signal.SIGKILL
    *events, rest = body.split(b"\n\n")
    assert len(events) == 2
    assert rest.startswith(b'data: {"id":"chatcmpl-')
    assert not rest.endswith(b"\n")


@pytest.mark.parametrize("moment", ["prefill", "decode"])
def test_a_hang_shows_as_pending_work_without_progress(spawn: Spawn, moment: str) -> None:
    worker = spawn(hang_at=moment, fault_after_tokens=1).ready()
    client = worker.send("POST", "/v1/chat/completions", chat_body("hi", stream=True))
    first = worker.heartbeat(lambda beat: beat.pending == 1)
    client.close()
    eventually(lambda: "cancelled" in worker.events())
    second = worker.heartbeat(lambda _: True)
    assert (second.pending, second.progress) == (1, first.progress)
    assert worker.ask("GET", "/health")[0] == 200


def test_faults_can_be_for_the_first_runs_only(spawn: Spawn) -> None:
    first = spawn(crash_at="prefill", exit_code=9, faulty_runs=1).ready()
    sse.read_broken(first.send("POST", "/v1/chat/completions", chat_body("hi")))
    assert first.process.wait(PATIENCE_S) == 9
    assert spawn().ready().chat("hi")[0] == 200


@pytest.mark.parametrize("lie", ["garbage", "huge_line", "unknown_type"])
def test_it_says_what_no_worker_says(spawn: Spawn, lie: str) -> None:
    worker = spawn(lie=lie, load_lines=1)
    worker.status()
    worker.go()
    lines = [worker.line() for _ in range(3)]
    bad = next(line for line in lines if b'"loading"' not in line and b'"heartbeat"' not in line)
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(bad[: 64 * 1024], type=Status)
    assert (len(bad) > 64 * 1024) == (lie == "huge_line")


def test_it_can_be_ready_before_go(spawn: Spawn) -> None:
    worker = spawn(lie="ready_before_go")
    assert [worker.status(), worker.status()] == [Imported(backend="scripted"), Ready()]
    assert not worker.socket_path.exists()


def test_it_can_be_ready_without_a_socket(spawn: Spawn) -> None:
    worker = spawn(lie="ready_without_socket").ready()
    assert not worker.socket_path.exists()


def test_it_can_load_after_it_was_ready(spawn: Spawn) -> None:
    worker = spawn(lie="loading_after_ready").ready()
    assert isinstance(worker.status(), Loading)


def test_a_script_that_acts_before_go_needs_the_folder_before_go(spawn: Spawn) -> None:
    worker = spawn(by_name=False, import_s=0.1)
    assert worker.status() == Imported(backend="scripted")
    worker.go()
    reason = worker.status()
    assert isinstance(reason, Failed)
    assert reason.reason.endswith("script.json: import_s: acts before go, which needs --models DIR")


def test_a_line_that_is_no_launch_ends_it(spawn: Spawn) -> None:
    worker = spawn()
    worker.go(context="many")
    assert worker.process.wait(PATIENCE_S) == 3
    assert worker.process.stderr is not None
    assert b"Expected `int`, got `str` - at `$.context`" in worker.process.stderr.read()


def test_unknown_script_keys_are_refused(tmp_path: Path, spawn: Spawn) -> None:
    with pytest.raises(ValueError, match="unknown field `tokenz`"):
        make_scripted_model(tmp_path, "bad", tokenz=3)
    worker = spawn()
    (worker.folder / "script.json").write_text('{"tokenz": 3}')
    with pytest.raises(ValueError, match="no signal is called 'SIGNOT'"):
        write_script(worker.folder, crash_signal="SIGNOT")


def test_it_starts_fast(spawn: Spawn) -> None:
    # Tests start hundreds. Processor time, because the wall's is the machine's load.
    took = []
    for _ in range(3):
        worker = spawn()
        worker.status()
        used = psutil.Process(worker.process.pid).cpu_times()
        took.append(used.user + used.system)
    assert min(took) < 0.15


def test_the_model_folder_is_small_on_disk_and_big_on_paper(tmp_path: Path) -> None:
    folder = make_scripted_model(tmp_path, "big", weights_bytes=10**10)
    file = (folder / "model.safetensors").stat()
    assert file.st_size == 8 + header_bytes(folder) + 10**10
    assert file.st_blocks * 512 < 100_000
    facts = model_facts(checkpoint.read(folder))
    plan = memory.plan(facts, backend="cpu", context=None, batch=8, limit_bytes=None)
    assert (plan.weights_bytes, plan.context) == (10**10, 2048)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<|user|>naïve\n").ids
    assert (ids[0], len(ids)) == (2, 1 + len("naïve\n".encode()))
    assert tokenizer.decode(ids) == "naïve\n"
