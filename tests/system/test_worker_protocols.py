"""Completions and messages over a real worker's socket: what they say is what chat says, in other words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.shared.chat import ChatTokenizer
from tests.tools.tiny_fixture import TinyModels
from tests.tools.tiny_models import CHAT_TEMPLATE, EOS_ID
from tests.tools.worker_process import WorkerProcess

# Tools may be declared, and the block of reasoning is opened where it was asked for.
TEMPLATE = CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n<think>\n{% if not (enable_thinking is defined and enable_thinking) %}"
    "\n</think>\n\n{% endif %}{% endif %}",
)
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n</think>\n\n"
TOOL = {"name": "get", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}},
        "required": ["x"], "additionalProperties": False}}  # fmt: skip
GREEDY = {"temperature": 0, "max_tokens": 12}
# A name of a property that no grammar takes up.
UNENFORCED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.fixture(scope="module")
def worker(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = shutil.copytree(tiny("llama"), tmp_path_factory.mktemp("models") / "speaker")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with WorkerProcess(folder).ready() as process:
        yield process


def complete(worker: WorkerProcess, prompt: object = RENDERED, **fields: Any) -> Any:
    return ask(worker, "/v1/completions", {"prompt": prompt, **GREEDY, **fields})


def message(worker: WorkerProcess, *messages: object, **fields: Any) -> Any:
    given = messages or ({"role": "user", "content": "hello"},)
    return ask(worker, "/v1/messages", {"messages": given, **GREEDY, **fields})


def ask(worker: WorkerProcess, path: str, fields: dict[str, Any]) -> Any:
    """A whole answer's body, or a stream's events without [DONE]."""
    connection = worker.connection()
    try:
        connection.request("POST", path, json.dumps(fields))
        response = connection.getresponse()
        answered = response.read()
    finally:
        connection.close()
    assert response.status == 200, answered
    if not fields.get("stream"):
        return json.loads(answered)
    lines = [line[6:] for line in answered.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def refused(worker: WorkerProcess, path: str, **fields: Any) -> dict[str, Any]:
    status, body, _ = worker.request("POST", path, fields)
    assert status == 400, body
    return dict(body)


def texts(body: Any) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def blocks(body: Any, kind: str) -> list[dict[str, Any]]:
    return [block for block in body["content"] if block["type"] == kind]


def test_a_rendered_prompt_completes_to_what_chat_answers(worker: WorkerProcess) -> None:
    chat = worker.chat("hello", **GREEDY)
    body = complete(worker)
    assert texts(body)[0].removeprefix(" ") == chat["choices"][0]["message"]["content"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert body["usage"][name] == chat["usage"][name]


def test_a_prompt_of_ids_is_that_of_its_text(worker: WorkerProcess) -> None:
    ids = ChatTokenizer.open(worker.launch.path).encode("Once upon")
    assert len(ids) == 9
    assert texts(complete(worker, ids)) == texts(complete(worker, "Once upon"))


def test_prompts_are_answered_in_order_each_as_alone(worker: WorkerProcess) -> None:
    prompts = ["Once upon", "a time", "there"]
    alone = [text for prompt in prompts for text in texts(complete(worker, prompt, n=2))]
    together = complete(worker, prompts, n=2)
    assert texts(together) == alone
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    assert together["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_a_streamed_completion_is_the_whole_one(worker: WorkerProcess) -> None:
    fields: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 5, "logprobs": 2}
    whole = complete(worker, ["ab", "cd"], **fields)
    chunks = complete(worker, ["ab", "cd"], stream=True, **fields)
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        offsets = [at for part in parts for at in (part["logprobs"] or {}).get("text_offset", [])]
        assert offsets == choice["logprobs"]["text_offset"]
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_text_offsets_say_where_tokens_are_in_the_text(worker: WorkerProcess) -> None:
    (choice,) = complete(worker, "Once", logprobs=3)["choices"]
    told = choice["logprobs"]
    for token, at in zip(told["tokens"], told["text_offset"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][at:].startswith(token)
    assert all(len(top) >= 3 for top in told["top_logprobs"])


@pytest.mark.parametrize(
    ("prompt", "param"), [([1, 2, 4000], "prompt[2]"), ([[1], [7, 4000]], "prompt[1][1]")]
)
def test_an_id_that_the_vocabulary_has_not_is_named(
    worker: WorkerProcess, prompt: object, param: str
) -> None:
    err = refused(worker, "/v1/completions", prompt=prompt)["error"]
    assert err["param"] == param
    assert "4000" in err["message"]


def test_a_form_that_can_not_be_enforced_leaves_a_completion_as_it_is(worker: WorkerProcess) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": UNENFORCED}}
    status, body, headers = worker.request(
        "POST", "/v1/completions", {"prompt": "Once", **GREEDY, "response_format": form}
    )
    assert status == 200
    assert texts(body) == texts(complete(worker, "Once"))
    assert "uniqueItems" in headers["Warning"]
    form["json_schema"]["strict"] = True  # type: ignore[index]
    err = refused(worker, "/v1/completions", prompt="Once", response_format=form)["error"]
    assert err["code"] == "unsupported_schema"


def test_a_model_without_a_chat_template_completes(tiny: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny("llama"), tmp_path / "base")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with WorkerProcess(folder).ready() as base:
        assert len(texts(complete(base, "Once"))[0]) > 0
        err = refused(base, "/v1/messages", messages=[{"role": "user", "content": "x"}], max_tokens=5)
        assert "no chat template" in err["error"]["message"]


def test_a_message_says_what_chat_says(worker: WorkerProcess) -> None:
    chat = worker.chat("hello", **GREEDY)
    body = message(worker)
    assert [block["text"] for block in body["content"]] == [chat["choices"][0]["message"]["content"]]
    assert body["stop_reason"] == "max_tokens"
    usage = body["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
    assert prompt == usage["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == usage["completion_tokens"] == chat["usage"]["completion_tokens"]
    assert body["id"].startswith("msg_")


def test_a_streamed_message_is_the_whole_one(worker: WorkerProcess) -> None:
    whole = message(worker)
    events = message(worker, stream=True)
    assert [event["type"] for event in (*events[:2], *events[-3:])] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    started = events[0]["message"]["usage"]
    assert started["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    said = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert said == whole["content"][0]["text"]
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stop_sequence_is_named(worker: WorkerProcess) -> None:
    said = message(worker)["content"][0]["text"]
    body = message(worker, stop_sequences=["no such", said[4:6]])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", said[4:6])
    assert body["content"][0]["text"] == said[: said.index(said[4:6])]


def test_a_forced_call_is_a_tool_use_with_its_input(worker: WorkerProcess) -> None:
    body = message(worker, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=200)
    assert body["stop_reason"] == "tool_use"
    (call,) = blocks(body, "tool_use")
    assert call["name"] == "get"
    assert isinstance(call["input"]["x"], int)
    assert call["id"].startswith("toolu_")


def test_reasoning_ends_at_its_budget_and_the_answer_follows(worker: WorkerProcess) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 60}
    free = worker.chat("hello", temperature=0, **fields)["choices"][0]["message"]
    held = worker.chat("hello", temperature=0, thinking_budget=10, **fields)["choices"][0]["message"]
    assert len(free["reasoning"]) > 40
    assert free["content"] == ""
    assert free["reasoning"].startswith(held["reasoning"])
    assert len(held["reasoning"].encode()) <= 10
    assert len(held["content"]) > 10


def test_a_budget_of_thinking_and_a_form_of_the_answer_go_together(worker: WorkerProcess) -> None:
    message_said = worker.chat(
        "hello", temperature=0, max_tokens=60, thinking_budget=10, guided_regex="[0-9]{3}",
        chat_template_kwargs={"enable_thinking": True},
    )["choices"][0]["message"]  # fmt: skip
    assert 0 < len(message_said["reasoning"].encode()) <= 10
    assert message_said["content"].isdecimal()
    assert len(message_said["content"]) == 3


def test_messages_thinking_is_a_signed_block_before_the_text(worker: WorkerProcess) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = message(worker, thinking=thinking, max_tokens=1100)
    assert body["content"][0]["type"] == "thinking"
    assert body["content"][0]["signature"]
    shown = message(worker, thinking={**thinking, "display": "omitted"}, max_tokens=1100)
    assert shown["content"][0]["thinking"] == ""
    assert shown["content"][1:] == body["content"][1:]


def test_an_answer_goes_on_from_the_assistants_last_message(worker: WorkerProcess) -> None:
    begun = "The best answer is ( "
    body = message(worker, {"role": "user", "content": "hello"}, {"role": "assistant", "content": begun})
    prompt = f"<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n{begun}"
    same = complete(worker, prompt)
    assert "".join(block["text"] for block in body["content"]).strip() == texts(same)[0].strip()
    assert body["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


def test_a_history_of_tools_is_shown_as_chats_is(worker: WorkerProcess) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "get", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "one"}
    body = message(
        worker,
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        tools=[TOOL],
    )  # fmt: skip
    function = {"name": "get", "parameters": TOOL["input_schema"]}
    made = {"id": "toolu_1", "type": "function", "function": {"name": "get", "arguments": '{"x":1}'}}
    messages = [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "one"}, {"role": "user", "content": "so?"},
    ]  # fmt: skip
    chat = ask(
        worker, "/v1/chat/completions",
        {"messages": messages, "tools": [{"type": "function", "function": function}], **GREEDY},
    )  # fmt: skip
    assert body["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]
    assert blocks(body, "text")[0]["text"] == chat["choices"][0]["message"]["content"]


def test_a_prompt_that_is_too_long_is_told_in_each_vendors_words(worker: WorkerProcess) -> None:
    long = "x" * 3000
    said = refused(worker, "/v1/messages", messages=[{"role": "user", "content": long}], max_tokens=5)
    assert said["type"] == "error"
    assert said["error"]["type"] == "invalid_request_error"
    assert said["error"]["message"].startswith("prompt is too long: 30")
    assert said["error"]["message"].endswith(" tokens > 2048 maximum")
    assert said["request_id"].startswith("req-")
    for path, field in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        value: object = long if field == "prompt" else [{"role": "user", "content": long}]
        err = refused(worker, path, **{field: value})["error"]
        assert err["code"] == "context_length_exceeded"
        assert err["param"] == field
        assert err["message"].startswith("This model's maximum context length is 2048 tokens. However, ")


def test_what_was_left_out_of_a_message_is_in_the_warning_header(worker: WorkerProcess) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    status, _, headers = worker.request(
        "POST", "/v1/messages",
        {"messages": [{"role": "user", "content": "hello"}], "tools": [hosted], **GREEDY},
    )  # fmt: skip
    assert status == 200
    assert "web_search_20250305" in headers["Warning"]


def test_an_end_of_turn_in_a_raw_prompt_is_the_token(worker: WorkerProcess) -> None:
    assert complete(worker, "<|im_end|>")["usage"]["prompt_tokens"] == 1
    assert texts(complete(worker, [EOS_ID])) == texts(complete(worker, "<|im_end|>"))
