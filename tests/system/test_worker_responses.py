"""Responses over a real worker's socket: what a client sees, whole and streamed, and beside chat."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlxpool.shared import control
from tests.tools.tiny_fixture import TinyModels
from tests.tools.tiny_models import CHAT_TEMPLATE
from tests.tools.worker_process import WorkerProcess

PATH = "/v1/responses"
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
# As Qwen's: the block is opened in the prompt, and closed there too where reasoning is switched off.
THINKING = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n<think>\n{% if enable_thinking is defined and not enable_thinking %}"
    "\n</think>\n\n{% endif %}{% endif %}",
)
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "namespace", "name": "mcp__sky", "description": "",
        "tools": [{"type": "function", "name": "look", "parameters": CITY}],
    },
    {"type": "web_search"},
]  # fmt: skip


@pytest.fixture(scope="module")
def worker(tiny: TinyModels) -> Iterator[WorkerProcess]:
    with WorkerProcess(tiny("llama"), context=2048).ready() as process:
        yield process


@pytest.fixture(scope="module")
def thinker(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = shutil.copytree(tiny("llama"), tmp_path_factory.mktemp("models") / "thinker")
    _give_template(folder, THINKING)
    with WorkerProcess(folder, thinking=True).ready() as process:
        yield process


def _give_template(folder: Path, template: str) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))


def answered(worker: WorkerProcess, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"input": "hello", "temperature": 0, **fields}
    status, response, _ = worker.request("POST", PATH, body, headers)
    assert status == 200, response
    Response.model_validate(response)
    return dict(response)


def streamed(
    worker: WorkerProcess, headers: dict[str, str] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    body = json.dumps({"input": "hello", "temperature": 0, "stream": True, **fields}).encode()
    connection = worker.connection()
    try:
        connection.request("POST", PATH, body, headers or {})
        data = connection.getresponse().read()
    finally:
        connection.close()
    events = [json.loads(event.split(b"\ndata: ")[1]) for event in data.split(b"\n\n")[:-1]]
    for event in events:
        # The one code that clients act on and the official client's types don't have.
        text = json.dumps(event).replace('"code": "context_length_exceeded"', '"code": "server_error"')
        _EVENTS.validate_python(json.loads(text))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(response: dict[str, Any]) -> Any:
    """With everything that two runs of one request have in common."""
    text = json.dumps(response).replace(response["id"].removeprefix("resp_"), "…")
    same = json.loads(text)
    same.pop("created_at")
    same.pop("completed_at")
    # The second run finds the first one's prompt.
    for place in ("input_tokens_details", "prompt_tokens_details"):
        same["usage"][place].pop("cached_tokens")
    return same


def test_a_stream_ends_with_what_the_whole_answer_is(worker: WorkerProcess) -> None:
    fields: dict[str, Any] = {"max_output_tokens": 40, "metadata": {"a": "b"}}
    whole = answered(worker, **fields)
    events = streamed(worker, **fields)
    assert events[-1]["type"] == "response.incomplete"
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    (message,) = whole["output"]
    (part,) = message["content"]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == part["text"]
    assert len(part["text"]) > 20
    assert whole["metadata"] == {"a": "b"}


def test_it_says_and_counts_what_chat_does(worker: WorkerProcess) -> None:
    fields: dict[str, Any] = {"top_p": 0.9, "seed": 4, "temperature": 1}
    stop = worker.text("hello", max_tokens=50, **fields)[20:24]
    fields["stop"] = ["never said", stop]
    chat = worker.chat("hello", max_tokens=50, **fields)
    response = answered(worker, max_output_tokens=50, **fields)
    assert response["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert (response["status"], response["incomplete_details"]) == ("completed", None)
    assert (response["temperature"], response["top_p"]) == (1.0, 0.9)
    usage = response["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == chat["usage"][name]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_an_answer_that_a_limit_cut_says_so(worker: WorkerProcess) -> None:
    response = answered(worker, max_output_tokens=3)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None


@pytest.mark.parametrize("summary", [None, "auto"])
def test_what_is_thought_is_an_item_of_its_own(thinker: WorkerProcess, summary: str | None) -> None:
    response = answered(
        thinker,
        max_output_tokens=30,
        reasoning={"summary": summary},
        include=["reasoning.encrypted_content"],
    )
    (item,) = response["output"]
    assert item["type"] == "reasoning"
    (part,) = item["summary" if summary else "content"]
    assert item["content" if summary else "summary"] == []
    assert len(part["text"]) > 10
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 30}


def test_no_effort_is_no_reasoning(thinker: WorkerProcess) -> None:
    response = answered(thinker, max_output_tokens=10, reasoning={"effort": "none"})
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


def test_output_that_comes_back_is_the_history_that_chat_would_send(worker: WorkerProcess) -> None:
    first = answered(worker, max_output_tokens=20)
    follow_up = [
        {"role": "user", "content": "hello"}, *first["output"], {"role": "user", "content": "more"},
    ]  # fmt: skip
    second = answered(worker, input=follow_up, max_output_tokens=20)
    said = first["output"][0]["content"][0]["text"]
    status, chat, _ = worker.request(
        "POST",
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": said},
                {"role": "user", "content": "more"},
            ],
            "max_tokens": 20,
            "temperature": 0,
        },
    )
    assert status == 200
    assert second["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert second["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_of_a_namespace_comes_back_by_its_own_names(
    worker: WorkerProcess, stream: bool
) -> None:
    fields: dict[str, Any] = {
        "tools": TOOLS, "tool_choice": {"type": "function", "name": "look"}, "max_output_tokens": 200,
    }  # fmt: skip
    response = streamed(worker, **fields)[-1]["response"] if stream else answered(worker, **fields)
    call = response["output"][-1]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__sky", "look")
    assert json.loads(call["arguments"])["city"] in ("Oslo", "Rome")
    assert response["status"] == call["status"] == "completed"
    assert response["warnings"] == [
        "tools[1]: web_search is a tool that this server doesn't run; it was left out"
    ]
    assert response["tools"] == TOOLS


def test_a_schema_is_enforced(worker: WorkerProcess) -> None:
    form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    response = answered(worker, text={"format": form}, max_output_tokens=200)
    assert json.loads(response["output"][0]["content"][0]["text"])["city"] in ("Oslo", "Rome")
    assert response["text"]["format"] == {**form, "description": None}


def test_log_probabilities_make_the_text(worker: WorkerProcess) -> None:
    fields: dict[str, Any] = {"top_logprobs": 2, "max_output_tokens": 12}
    events = streamed(worker, **fields)
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for delta in deltas for entry in delta["logprobs"]] == part["logprobs"]


def test_an_answer_has_the_ids_that_the_parent_gave(worker: WorkerProcess) -> None:
    given = {control.HEADER_RESPONSE_ID: "resp_given", control.HEADER_PREVIOUS_ID: "resp_before"}
    response = answered(worker, given, max_output_tokens=2)
    assert (response["id"], response["previous_response_id"]) == ("resp_given", "resp_before")
    assert response["output"][0]["id"] == "msg_given0000"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_an_error_before_anything_is_said(
    worker: WorkerProcess, fields: dict[str, Any], code: str, param: str, stream: bool
) -> None:
    status, body, _ = worker.request("POST", PATH, {"input": "hello", "stream": stream, **fields})
    assert status == 400
    assert (body["error"]["code"], body["error"]["param"]) == (code, param)


def test_a_prompt_that_is_too_long_ends_a_stream_that_begins_as_any_other(worker: WorkerProcess) -> None:
    long: dict[str, Any] = {"input": "x" * 5000, "instructions": "Be brief.", "temperature": 0.5}
    given = {control.HEADER_RESPONSE_ID: "resp_given", control.HEADER_PREVIOUS_ID: "resp_before"}
    events = streamed(worker, given, **long)
    assert [event["type"] for event in events] == [
        "response.created", "response.in_progress", "response.failed",
    ]  # fmt: skip
    response = events[-1]["response"]
    assert (response["status"], response["output"], response["usage"]) == ("failed", [], None)
    assert response["error"]["code"] == response["error"]["type"] == "context_length_exceeded"
    assert response["error"]["param"] == "input"
    assert "maximum context length is 2048 tokens" in response["error"]["message"]
    assert (response["id"], response["previous_response_id"]) == ("resp_given", "resp_before")
    assert (response["instructions"], response["temperature"]) == ("Be brief.", 0.5)
    before = worker.stats()["errors"]
    status, body, _ = worker.request("POST", PATH, long)
    assert status == 400
    assert (body["error"]["code"], body["error"]["param"]) == ("context_length_exceeded", "input")
    assert worker.stats()["errors"] == before + 1
