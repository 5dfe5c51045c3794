"""The official OpenAI client on a running server with the starter model: Responses."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.clients.conftest import ANSWER_TIMEOUT_S, STARTER, lenient
from tests.tools.served import Served

pytestmark = pytest.mark.starter

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[4]


def test_a_response_whole_and_kept(gpt: openai.OpenAI) -> None:
    made = gpt.responses.create(model=STARTER, input=QUESTION, temperature=0, metadata={"a": "b"})
    assert (made.status, made.output_text, made.model) == ("completed", ANSWER, STARTER)
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (42, 8, 50)
    assert made.metadata == {"a": "b"}
    kept = gpt.responses.retrieve(made.id)
    assert kept.model_dump() == made.model_dump()

    asked = list(gpt.responses.input_items.list(made.id))
    assert [item.type for item in asked] == ["message"]
    assert QUESTION in json.dumps([item.model_dump() for item in asked])

    gpt.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as gone:
        gpt.responses.retrieve(made.id)
    assert gone.value.code == "response_not_found"


def test_a_streamed_response_is_the_whole_one_event_by_event(gpt: openai.OpenAI) -> None:
    events = list(gpt.responses.create(model=STARTER, input=QUESTION, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == ANSWER
    replayed = list(gpt.responses.retrieve(last.response.id, stream=True))
    assert [event.model_dump() for event in replayed] == [event.model_dump() for event in events]
    rest = list(gpt.responses.retrieve(last.response.id, stream=True, starting_after=5))
    assert rest == replayed[6:]


def test_the_stream_helper_puts_a_response_together(gpt: openai.OpenAI) -> None:
    with gpt.responses.stream(model=STARTER, input=QUESTION, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", ANSWER)


def test_an_incomplete_response_says_why_and_can_be_gone_on_from(gpt: openai.OpenAI) -> None:
    cut = gpt.responses.create(model=STARTER, input=QUESTION, temperature=0, max_output_tokens=3)
    assert (cut.status, cut.output_text) == ("incomplete", "The capital of")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    more = gpt.responses.create(
        model=STARTER, input="And of Italy?", previous_response_id=cut.id, temperature=0, max_output_tokens=8
    )
    assert more.previous_response_id == cut.id
    assert cut.usage is not None
    assert more.usage is not None
    assert more.usage.input_tokens > cut.usage.input_tokens + 3


def test_a_tools_round_trip_by_previous_response_id(gpt: openai.OpenAI) -> None:
    called = gpt.responses.create(
        model=STARTER,
        input="Is it warm in Oslo?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=60,
    )
    (call,) = called.output
    assert call.type == "function_call"
    assert call.name == "weather"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    told = gpt.responses.create(
        model=STARTER,
        previous_response_id=called.id,
        tools=[WEATHER],
        tool_choice="none",
        temperature=0,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "-3 degrees, snow"}],
        max_output_tokens=24,
    )
    assert told.output_text
    assert [item.type for item in told.output] == ["message"]
    listed = [item.type for item in gpt.responses.input_items.list(told.id, order="asc")]
    assert listed == ["message", "function_call", "function_call_output"]


def test_a_streamed_call_of_a_function_and_of_a_custom_tool(gpt: openai.OpenAI) -> None:
    with gpt.responses.stream(
        model=STARTER,
        input="Is it warm in Oslo?",
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=60,
    ) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_response().output
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    assert call.type == "function_call"

    shell: Any = {"type": "custom", "name": "shell", "description": "Runs a command"}
    events = list(
        gpt.responses.create(
            model=STARTER,
            input="List the files.",
            tools=[shell],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_output_tokens=60,
            stream=True,
        )
    )
    ended = [event for event in events if event.type in ("response.completed", "response.incomplete")]
    (made,) = ended
    (item,) = made.response.output
    assert item.type == "custom_tool_call"
    assert item.name == "shell"
    pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(pieces) == item.input


def test_the_parse_helper_reads_structured_output(gpt: openai.OpenAI) -> None:
    parsed = gpt.responses.parse(
        model=STARTER, input="Name a pet.", text_format=Animal, temperature=0, max_output_tokens=60
    )
    animal = parsed.output_parsed
    assert isinstance(animal, Animal)
    with gpt.responses.stream(
        model=STARTER, input="Name a pet.", text_format=Animal, temperature=0, max_output_tokens=60
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == animal


def test_a_background_response_is_polled_and_can_be_cancelled(gpt: openai.OpenAI) -> None:
    started = gpt.responses.create(
        model=STARTER, input="Tell a long story.", background=True, temperature=0, max_output_tokens=3000
    )
    assert started.status in ("queued", "in_progress")
    assert started.background is True
    ended = gpt.responses.cancel(started.id)
    assert ended.status == "cancelled"
    assert gpt.responses.cancel(started.id).status == "cancelled"

    short = gpt.responses.create(model=STARTER, input=QUESTION, background=True, temperature=0)
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while short.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        short = gpt.responses.retrieve(short.id)
    assert (short.status, short.output_text) == ("completed", ANSWER)


def test_what_is_not_stored_can_not_be_retrieved(gpt: openai.OpenAI) -> None:
    made = gpt.responses.create(model=STARTER, input=QUESTION, temperature=0, store=False)
    assert made.store is False
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError) as unknown:
        gpt.responses.create(model=STARTER, input="And?", previous_response_id=made.id)
    assert (unknown.value.code, unknown.value.param) == ("response_not_found", "previous_response_id")


def test_a_compacted_conversation_goes_on(starter: Served, gpt: openai.OpenAI) -> None:
    made = gpt.responses.create(model=STARTER, input=QUESTION, temperature=0)
    compacted = lenient(starter).responses.compact(model=STARTER, previous_response_id=made.id)
    assert compacted.object == "response.compaction"
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    again: Any = [item.model_dump(exclude_none=True) for item in compacted.output]
    more = gpt.responses.create(
        model=STARTER, input=[*again, {"role": "user", "content": "Go on."}], max_output_tokens=8
    )
    assert more.status in ("completed", "incomplete")
