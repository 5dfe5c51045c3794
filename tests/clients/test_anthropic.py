"""The official Anthropic client on a running server with the starter model."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import pydantic
import pytest

from tests.clients.conftest import STARTER

pytestmark = pytest.mark.starter

# The client has no parameter for what every server knows.
EXACT = {"temperature": 0}

QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER = "The capital of France is Paris."
ASKED: Any = [{"role": "user", "content": QUESTION}]

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Animal(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    legs: Literal[4]


def prompt_tokens(usage: Any) -> int:
    return (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )


def said(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_whole_with_its_usage(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model=STARTER, max_tokens=40, messages=ASKED, extra_body=EXACT)
    assert (message.type, message.role, message.model) == ("message", "assistant", STARTER)
    assert message.id.startswith("msg_")
    assert [block.type for block in message.content] == ["text"]
    assert said(message) == ANSWER
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert (prompt_tokens(message.usage), message.usage.output_tokens) == (42, 8)
    assert message._request_id


def test_a_streamed_message_has_every_event_in_its_order(claude: anthropic.Anthropic) -> None:
    events = list(
        claude.messages.create(model=STARTER, max_tokens=40, messages=ASKED, extra_body=EXACT, stream=True)
    )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert events[0].type == "message_start"
    assert prompt_tokens(events[0].message.usage) == 42
    assert events[-2].type == "message_delta"
    assert events[-2].delta.stop_reason == "end_turn"
    assert events[-2].usage.output_tokens == 8


def test_the_stream_helper_puts_a_message_together(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=STARTER, max_tokens=40, messages=ASKED, extra_body=EXACT) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert (said(final), final.stop_reason, final.usage.output_tokens) == (ANSWER, "end_turn", 8)
    assert prompt_tokens(final.usage) == 42


def test_a_stop_sequence_and_the_length_end_a_message(claude: anthropic.Anthropic) -> None:
    stopped = claude.messages.create(
        model=STARTER, max_tokens=40, messages=ASKED, extra_body=EXACT, stop_sequences=["nowhere", " is"]
    )
    assert (said(stopped), stopped.stop_reason, stopped.stop_sequence) == (
        "The capital of France",
        "stop_sequence",
        " is",
    )
    cut = claude.messages.create(model=STARTER, max_tokens=3, messages=ASKED, extra_body=EXACT)
    assert (said(cut), cut.stop_reason, cut.stop_sequence) == ("The capital of", "max_tokens", None)


def test_a_tools_round_trip(claude: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "Is it warm in Oslo?"}]
    called = claude.messages.create(
        model=STARTER,
        max_tokens=60,
        messages=messages,
        extra_body=EXACT,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    assert called.stop_reason == "tool_use"
    (call,) = called.content
    assert call.type == "tool_use"
    assert call.id.startswith("toolu_")
    assert call.name == "weather"
    assert call.input["city"] in ("Oslo", "Rome")

    messages.append({"role": "assistant", "content": called.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "-3 degrees, snow"}
    messages.append({"role": "user", "content": [result, {"type": "text", "text": "So?"}]})
    told = claude.messages.create(
        model=STARTER,
        max_tokens=24,
        messages=messages,
        extra_body=EXACT,
        tools=[WEATHER],
        tool_choice={"type": "none"},
    )
    assert said(told)
    assert [block.type for block in told.content] == ["text"]

    with claude.messages.stream(
        model=STARTER,
        max_tokens=60,
        messages=messages[:1],
        extra_body=EXACT,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    ) as stream:
        streamed = stream.get_final_message()
    (again,) = streamed.content
    assert again.type == "tool_use"
    assert (again.name, again.input, streamed.stop_reason) == ("weather", call.input, "tool_use")


def test_the_tool_runner_calls_a_function_of_the_clients_and_goes_on(claude: anthropic.Anthropic) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        asked.append(city)
        return "-3 degrees, snow"

    runner = claude.beta.messages.tool_runner(
        model=STARTER,
        max_tokens=40,
        max_iterations=2,
        extra_body=EXACT,
        tools=[weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        messages=[{"role": "user", "content": "Is it warm in Oslo?"}],
    )
    answers = list(runner)
    assert asked
    assert answers[0].stop_reason == "tool_use"
    assert len(answers) == 2


def test_the_parse_helper_reads_structured_output(claude: anthropic.Anthropic) -> None:
    parsed = claude.messages.parse(
        model=STARTER,
        max_tokens=60,
        extra_body=EXACT,
        output_format=Animal,
        messages=[{"role": "user", "content": "Name a pet."}],
    )
    assert isinstance(parsed.parsed_output, Animal)


@pytest.mark.parametrize(
    "thinking",
    [{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}],
    ids=lambda thinking: thinking["type"],
)
def test_a_model_that_can_not_think_answers_whatever_thinking_says(
    claude: anthropic.Anthropic, thinking: Any
) -> None:
    message = claude.messages.create(
        model=STARTER, max_tokens=1025, messages=ASKED, extra_body=EXACT, thinking=thinking
    )
    assert said(message) == ANSWER


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASKED},
        {"messages": ASKED, "system": "Be brief."},
        {"messages": ASKED, "system": [{"type": "text", "text": "Be brief."}], "tools": [WEATHER]},
        {
            "messages": [
                {"role": "user", "content": "Is it warm in Oslo?"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "Let me see."},
                        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "-3 degrees"}],
                },
            ],
            "tools": [WEATHER],
        },
    ],
    ids=["plain", "system", "tools", "results"],
)
def test_counted_tokens_are_those_that_a_message_then_uses(claude: anthropic.Anthropic, body: Any) -> None:
    counted = claude.messages.count_tokens(model=STARTER, **body)
    used = claude.messages.create(model=STARTER, max_tokens=1, extra_body=EXACT, **body)
    assert counted.input_tokens == prompt_tokens(used.usage)


def test_models_are_listed_and_told_apart(claude: anthropic.Anthropic) -> None:
    (model,) = list(claude.models.list())
    assert (model.id, model.type) == (STARTER, "model")
    assert claude.models.retrieve(STARTER).id == STARTER
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("smolm2")


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_request_is_the_clients_own_exception(
    claude: anthropic.Anthropic, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature") as refused:
        claude.messages.create(
            model=STARTER, max_tokens=9, messages=ASKED, extra_body={"temperature": 9}, stream=stream
        )
    assert refused.value.request_id
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="nothing"):
        claude.messages.create(model="nothing", max_tokens=9, messages=ASKED, stream=stream)
    long: Any = [{"role": "user", "content": "far too long " * 20_000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        claude.messages.create(model=STARTER, max_tokens=9, messages=long, stream=stream)
