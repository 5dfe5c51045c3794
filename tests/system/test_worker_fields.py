"""Every field that the table calls honoured changes the answer, or the form it comes in.

One real worker over a tiny model whose template reads tools and may open a block of reasoning. A row of
`CASES` says what is asked without the field and with it, and what in the answer must differ for that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from mlxpool.shared.api.chat_fields import FIELDS
from mlxpool.shared.control import AdaptersLaunch
from tests.tools import tiny_adapters
from tests.tools.tiny_fixture import TinyModels
from tests.tools.tiny_models import CHAT_TEMPLATE, EOS_ID
from tests.tools.worker_process import WorkerProcess

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    + CHAT_TEMPLATE
    + "<think>\n{% if not (enable_thinking is defined and enable_thinking) %}\n</think>\n\n{% endif %}"
)

# A body of a whole answer, or the events of a stream.
Body = Any


class Case(NamedTuple):
    """field: its value, with which `look` shows something else than without it. rest: the other fields."""

    value: Any
    look: Callable[[Body], Any]
    rest: dict[str, Any]


def content(body: Body) -> Any:
    return body["choices"][0]["message"]["content"]


def logprobs(body: Body) -> Any:
    return body["choices"][0]["logprobs"]


def calls(body: Body) -> int:
    return len(body["choices"][0]["message"].get("tool_calls", ()))


def reasoning(body: Body) -> Any:
    return body["choices"][0]["message"].get("reasoning")


def usage(name: str) -> Callable[[Body], Any]:
    return lambda body: body["usage"][name]


def is_stream(body: Body) -> bool:
    return isinstance(body, list)


def usage_has_a_chunk(body: Body) -> bool:
    return body[-1]["choices"] == []


def case(value: Any, look: Callable[[Body], Any] = content, **rest: Any) -> Case:
    return Case(value, look, {"temperature": 0, "max_tokens": 12, **rest})


def drawn(value: Any, **rest: Any) -> Case:
    return case(value, content, **{"temperature": 1.5, "seed": 3, **rest})


def likely(value: Any, **rest: Any) -> Case:
    """A field that changes what is likely; at any rate that is seen in the log-probabilities."""
    return case(value, logprobs, **{"logprobs": True, "top_logprobs": 5, **rest})


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"tools": [{"type": "function", "function": {"name": "ping", "parameters": NOTHING}}]}

CASES: dict[str, Case] = {
    "model": case("another-name", lambda body: body["model"], model="one-name"),
    "messages": case([{"role": "user", "content": "something else"}]),
    "stream": case(True, is_stream),
    "stream_options": case({"include_usage": True}, usage_has_a_chunk, stream=True),
    "max_tokens": case(3, usage("completion_tokens")),
    "max_completion_tokens": Case(3, usage("completion_tokens"), {"temperature": 0}),
    "temperature": drawn(0),
    "top_p": drawn(1e-6),
    "top_k": drawn(1),
    "min_p": drawn(1.0),
    "seed": drawn(4),
    "stop": case(list("aeioutnsrldhcmpg"), max_tokens=60),
    "n": case(2, lambda body: len(body["choices"])),
    "repetition_penalty": likely(1.5),
    "repetition_context_size": likely(1, repetition_penalty=1.5),
    "presence_penalty": likely(1.5),
    "presence_context_size": likely(1, presence_penalty=1.5),
    "frequency_penalty": likely(1.5),
    "frequency_context_size": likely(1, frequency_penalty=1.5),
    "xtc_probability": drawn(1.0, max_tokens=60),
    "xtc_threshold": drawn(0.5, xtc_probability=1.0, max_tokens=60),
    "logit_bias": case({"33": 100}),
    "logprobs": case(True, logprobs),
    "top_logprobs": case(4, logprobs, logprobs=True),
    "tools": case(TOOLS["tools"], usage("prompt_tokens")),
    "tool_choice": case("required", calls, max_tokens=100, **TOOLS),
    # Without an end of turn a model that may goes on calling.
    "parallel_tool_calls": case(
        False, calls, max_tokens=200, tool_choice="required", logit_bias={str(EOS_ID): -100}, **TOOLS
    ),
    "response_format": case({"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 12}}}),
    "structured_outputs": case({"choice": ["yes", "no"]}),
    "guided_json": case({"enum": ["a", "b"]}),
    "guided_regex": case("[0-9]{3}"),
    "guided_choice": case(["yes", "no"]),
    "guided_grammar": case('root ::= "so " [0-9]'),
    "chat_template_kwargs": case({"enable_thinking": True}, reasoning),
    "reasoning_effort": case("high", reasoning),
    "thinking_budget": case(3, reasoning, chat_template_kwargs={"enable_thinking": True}),
    "adapter": case("a"),
}


@pytest.fixture(scope="module")
def worker(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    folder = shutil.copytree(tiny("llama"), tmp_path_factory.mktemp("models") / "reader")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    adapters = tmp_path_factory.mktemp("adapters")
    tiny_adapters.make(adapters / "a")
    launch = AdaptersLaunch(str(adapters))
    with WorkerProcess(folder, adapters=launch).ready() as process:
        yield process


def ask(worker: WorkerProcess, fields: dict[str, Any]) -> Body:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields})
    connection = worker.connection()
    try:
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        answered = response.read()
    finally:
        connection.close()
    assert response.status == 200, answered
    if not response.headers["Content-Type"].startswith("text/event-stream"):
        return json.loads(answered)
    events = [event.removeprefix(b"data: ") for event in answered.split(b"\n\n") if event]
    assert events.pop() == b"[DONE]"
    return [json.loads(event) for event in events]


def test_every_honoured_field_has_a_case() -> None:
    assert set(CASES) == {name for name, field in FIELDS.items() if field.status == "honoured"}


@pytest.mark.parametrize("field", CASES)
def test_the_field_changes_the_answer(worker: WorkerProcess, field: str) -> None:
    value, look, rest = CASES[field]
    without = [look(ask(worker, rest)) for _ in range(2)]
    # What changes by itself would show nothing.
    assert without[0] == without[1]
    assert look(ask(worker, {**rest, field: value})) != without[0]
