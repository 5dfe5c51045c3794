"""Chat over a real worker's socket: what a client sees, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from mlxpool.shared import control
from tests.tools.tiny_fixture import TinyModels
from tests.tools.worker_process import WorkerProcess, chat_body, streamed_text

PROMPT = "hello"


@pytest.fixture(scope="module")
def worker(tiny: TinyModels) -> Iterator[WorkerProcess]:
    with WorkerProcess(tiny("llama"), context=2048).ready() as process:
        yield process


def refusal(worker: WorkerProcess, body: object) -> tuple[int, dict[str, Any]]:
    status, answer, headers = worker.request("POST", "/v1/chat/completions", body)
    assert headers["Content-Type"].startswith("application/json")
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return status, answer["error"]


def test_a_stream_says_what_the_whole_answer_says(worker: WorkerProcess) -> None:
    whole = worker.chat(PROMPT, max_tokens=60, temperature=0)
    chunks = list(worker.stream(PROMPT, max_tokens=60, temperature=0))
    choice = whole["choices"][0]
    assert len(choice["message"]["content"]) > 20
    assert streamed_text(chunks) == choice["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


def test_a_stream_has_one_role_chunk_first_and_one_finish_chunk_last(worker: WorkerProcess) -> None:
    chunks = list(worker.stream(PROMPT, max_tokens=5, temperature=0))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "tiny", "chat.completion.chunk")
    }
    assert [chunk for chunk in chunks if "usage" in chunk] == chunks[-1:]


def test_asked_for_usage_comes_in_a_last_chunk_of_its_own(worker: WorkerProcess) -> None:
    chunks = list(worker.stream(PROMPT, max_tokens=5, temperature=0, stream_options={"include_usage": True}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


def test_usage_counts_the_prompt_and_every_sampled_token(worker: WorkerProcess) -> None:
    usage = worker.chat(PROMPT, max_tokens=7, temperature=0)["usage"]
    # The tiny tokenizer: one token per byte, one per special token.
    prompt = len("user\nhello" + "\n" + "assistant\n") + 3
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": 7,
        "total_tokens": prompt + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "lane": "batch",
    }


def test_one_token_can_be_asked_for(worker: WorkerProcess) -> None:
    answer = worker.chat(PROMPT, max_tokens=1, temperature=0)
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    longer = worker.text(PROMPT, max_tokens=10, temperature=0)
    assert longer.startswith(answer["choices"][0]["message"]["content"])


def test_an_eos_ends_the_answer_and_is_not_a_length_limit_even_at_the_limit(worker: WorkerProcess) -> None:
    free = worker.chat("what?", max_tokens=500, temperature=0)
    assert free["choices"][0]["finish_reason"] == "stop"
    used = free["usage"]["completion_tokens"]
    assert 1 < used < 500
    exact = worker.chat("what?", max_tokens=used, temperature=0)
    assert exact["choices"][0]["finish_reason"] == "stop"
    shorter = worker.chat("what?", max_tokens=used - 1, temperature=0)
    assert shorter["choices"][0]["finish_reason"] == "length"
    assert exact["choices"] == free["choices"]
    assert shorter["choices"][0]["message"] == free["choices"][0]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_never_sent(worker: WorkerProcess, stream: bool) -> None:
    full = worker.text(PROMPT, max_tokens=60, temperature=0)
    stop = full[20:24]
    expected = full[: full.index(stop)]
    fields: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "stop": [stop, "never said"]}
    if stream:
        chunks = list(worker.stream(PROMPT, **fields))
        text, reason = streamed_text(chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = worker.chat(PROMPT, **fields)["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason) == (expected, "stop")


def test_a_seed_gives_the_same_answer_and_another_seed_another(worker: WorkerProcess) -> None:
    def draw(seed: int) -> str:
        return worker.text(PROMPT, max_tokens=40, temperature=1, seed=seed)

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(5)}) == 5


def test_no_seed_is_fresh_entropy_every_time(worker: WorkerProcess) -> None:
    answers = {worker.text(PROMPT, max_tokens=40, temperature=1.5) for _ in range(4)}
    assert len(answers) == 4


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_filter_that_leaves_one_token_is_greedy(worker: WorkerProcess, narrow: dict[str, float]) -> None:
    greedy = worker.text(PROMPT, max_tokens=30, temperature=0)
    assert worker.text(PROMPT, max_tokens=30, temperature=1.5, seed=3, **narrow) == greedy
    assert worker.text(PROMPT, max_tokens=30, temperature=1.5, seed=3) != greedy


def test_answers_echo_the_name_that_was_asked_for_and_the_request_id(worker: WorkerProcess) -> None:
    headers = {control.HEADER_ASKED_MODEL: quote("mine/é 1"), control.HEADER_REQUEST_ID: "req-7"}
    status, body, answered = worker.request(
        "POST", "/v1/chat/completions", chat_body(PROMPT, max_tokens=1), headers
    )
    assert status == 200
    assert body["model"] == "mine/é 1"
    assert answered[control.HEADER_REQUEST_ID] == "req-7"
    assert "request req-7: ok, 1 tokens" in worker.log.read_text()


def test_a_stream_has_the_id_and_the_time_that_the_parent_gave_it(worker: WorkerProcess) -> None:
    headers = {control.HEADER_RESPONSE_ID: "chatcmpl-given", control.HEADER_CREATED: "1700000000"}
    chunks = list(worker.stream(PROMPT, headers, max_tokens=3, temperature=0))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {(chunk["id"], chunk["created"]) for chunk in chunks} == {("chatcmpl-given", 1700000000)}


def test_an_answer_ends_at_the_contexts_end(worker: WorkerProcess) -> None:
    filler = "x" * 2000
    answer = worker.chat(filler, max_tokens=500, temperature=1, seed=1, stop=None)
    assert answer["usage"]["prompt_tokens"] == 2000 + 19
    assert answer["usage"]["total_tokens"] <= 2048
    if answer["usage"]["total_tokens"] == 2048:
        assert answer["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(worker: WorkerProcess) -> None:
    status, err = refusal(worker, chat_body("x" * 3000))
    assert (status, err["code"]) == (400, "context_length_exceeded")
    assert "3019" in err["message"]
    assert "2048" in err["message"]


def test_errors_come_in_the_protocols_envelope(worker: WorkerProcess) -> None:
    assert refusal(worker, b"{")[0] == 400
    assert refusal(worker, b'"text"')[1]["code"] == "invalid_request"
    assert refusal(worker, b"[" * 100_000)[0] == 400
    status, err = refusal(worker, chat_body(PROMPT, adapter="a"))
    assert (status, err["code"], err["param"]) == (400, "invalid_request", "adapter")
    status, err = refusal(worker, chat_body(PROMPT, temprature=1))
    assert err["param"] == "temprature"
    assert "temperature" in err["message"]
    assert worker.request("GET", "/v1/nothing")[0] == 404
    assert worker.request("GET", "/v1/chat/completions")[0] == 405
    assert worker.request("POST", "/v1/chat/completions", b" " * (65 * 1024 * 1024))[0] == 413
    assert worker.text(PROMPT, max_tokens=2, temperature=0)


def test_a_template_that_refuses_is_the_clients_400(tiny: TinyModels, tmp_path: Any) -> None:
    import shutil

    folder = shutil.copytree(tiny("llama"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with WorkerProcess(folder).ready() as strict:
        status, err = refusal(strict, chat_body(PROMPT))
    assert status == 400
    assert "roles must alternate" in err["message"]


@pytest.mark.parametrize("kind", ["llama", "quantised"])
def test_launch_settings_are_defaults_a_request_can_change(tiny: TinyModels, kind: Any) -> None:
    with WorkerProcess(tiny(kind), temperature=0.0, max_tokens=9).ready() as process:
        answer = process.chat(PROMPT)
        assert answer["usage"]["completion_tokens"] <= 9
        assert process.chat(PROMPT)["choices"] == answer["choices"]
        assert process.chat(PROMPT, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_quantised_folder_on_the_cpu_answers_as_its_dequantised_twin(tiny: TinyModels) -> None:
    answers = []
    for kind in ("quantised", "dequantised"):
        with WorkerProcess(tiny(kind)).ready() as process:
            if process.stats()["backend"] != "cpu":
                pytest.skip("other backends keep the quantised weights")
            assert process.stats()["dtype"] == "float32"
            answers.append([process.text(word, max_tokens=80, temperature=0) for word in ("hello", "b", "c")])
    assert answers[0] == answers[1]


def test_a_slow_reader_stalls_nobody_else(worker: WorkerProcess) -> None:
    slow = worker.stream(PROMPT, max_tokens=1500, temperature=1.9, seed=4)
    next(slow)
    before = time.monotonic()
    assert worker.text(PROMPT, max_tokens=20, temperature=0)
    assert time.monotonic() - before < 5
    slow.close()
