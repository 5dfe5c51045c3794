"""The official OpenAI client on a running server with the starter model: chat, completions, models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from mlxpool.shared.chat import ChatTokenizer
from tests.clients.conftest import STARTER, lenient
from tests.tools.served import Served

pytestmark = pytest.mark.starter

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."
ASKED: Any = [{"role": "user", "content": QUESTION}]

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[4]


def test_chat_answers_whole_with_its_usage(gpt: openai.OpenAI) -> None:
    answer = gpt.chat.completions.create(model=STARTER, messages=ASKED, temperature=0)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        ANSWER,
        "stop",
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == STARTER
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        42,
        8,
        50,
    )


def test_chat_streams_the_same_and_the_helper_puts_it_together(gpt: openai.OpenAI) -> None:
    with gpt.chat.completions.stream(
        model=STARTER, messages=ASKED, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == ANSWER
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (42, 8)


def test_a_stop_string_and_the_length_end_a_chat(gpt: openai.OpenAI) -> None:
    stopped = gpt.chat.completions.create(model=STARTER, messages=ASKED, temperature=0, stop=" is")
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        "The capital of France",
        "stop",
    )
    cut = gpt.chat.completions.create(model=STARTER, messages=ASKED, temperature=0, max_completion_tokens=3)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("The capital of", "length")


def test_a_tools_round_trip_in_chat(gpt: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Is it warm in Oslo?"}]
    called = gpt.chat.completions.create(
        model=STARTER,
        messages=messages,
        temperature=0,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
    )
    assert called.choices[0].finish_reason == "tool_calls"
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")

    messages.append(called.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "-3 degrees, snow"})
    told = gpt.chat.completions.create(
        model=STARTER, messages=messages, temperature=0, tools=[WEATHER], tool_choice="none", max_tokens=24
    )
    assert told.choices[0].message.content
    assert not told.choices[0].message.tool_calls

    with gpt.chat.completions.stream(
        model=STARTER,
        messages=messages[:1],
        temperature=0,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        max_tokens=60,
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    (again,) = streamed.message.tool_calls or []
    assert (again.function.name, again.function.arguments) == ("weather", call.function.arguments)


def test_the_parse_helper_reads_structured_output(gpt: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Name a pet."}]
    parsed = gpt.chat.completions.parse(
        model=STARTER, messages=messages, response_format=Animal, temperature=0, max_tokens=60
    )
    animal = parsed.choices[0].message.parsed
    assert isinstance(animal, Animal)
    with gpt.chat.completions.stream(
        model=STARTER, messages=messages, response_format=Animal, temperature=0, max_tokens=60
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == animal


def test_completions_whole_streamed_and_several(
    starter: Served, gpt: openai.OpenAI, starter_folder: Path
) -> None:
    whole = gpt.completions.create(
        model=STARTER, prompt="One, two, three, four,", max_tokens=6, temperature=0, logprobs=2
    )
    (choice,) = whole.choices
    assert whole.object == "text_completion"
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[0] == 0
    assert len(choice.logprobs.token_logprobs or []) == 6

    chunks = list(
        lenient(starter).completions.create(
            model=STARTER, prompt="One, two, three, four,", max_tokens=6, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens

    prompts = ["One, two, three, four,", "The sky is"]
    both = gpt.completions.create(model=STARTER, prompt=prompts, max_tokens=6, temperature=0, n=2)
    assert [one.index for one in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text == choice.text
    assert both.choices[2].text == both.choices[3].text
    assert both.usage is not None
    assert both.usage.completion_tokens == 24

    ids = ChatTokenizer.open(starter_folder).encode(prompts[0])
    by_ids = gpt.completions.create(model=STARTER, prompt=ids, max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == choice.text


def test_models_are_listed_and_told_apart(gpt: openai.OpenAI) -> None:
    assert [model.id for model in gpt.models.list()] == [STARTER]
    assert gpt.models.retrieve(STARTER).object == "model"
    with pytest.raises(openai.NotFoundError, match="no model 'smolm2'"):
        gpt.models.retrieve("smolm2")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_request_is_the_clients_own_exception(gpt: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        gpt.chat.completions.create(model=STARTER, messages=ASKED, temperature=9, stream=stream)
    assert refused.value.param == "temperature"
    assert refused.value.request_id
    with pytest.raises(openai.NotFoundError) as unknown:
        gpt.chat.completions.create(model="nothing", messages=ASKED, stream=stream)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        gpt.chat.completions.create(
            model=STARTER, messages=[{"role": "user", "content": "far too long " * 20_000}], stream=stream
        )
    assert long.value.code == "context_length_exceeded"
    assert "maximum context length" in long.value.message
