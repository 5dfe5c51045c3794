"""Messages of a chat: what clients write, what templates read, what is refused on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage

from mlxpool.shared.api.chat_messages import read_messages
from mlxpool.shared.api.messages import ChatMessage, MadeCall
from mlxpool.shared.api.normalise import strip_volatile, template_messages
from mlxpool.shared.errors import ApiError

BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"
USAGE = "Token usage: 1234/200000; 198766 remaining"


def call(**fields: object) -> dict[str, object]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}


def made(arguments: object) -> dict[str, Any] | str:
    """How a call's arguments are read."""
    calls = [call(function={"name": "f", "arguments": arguments})]
    return read_messages([{"role": "assistant", "tool_calls": calls}])[0].tool_calls[0].arguments


def refusal(message: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_messages([{"role": "user", "content": "x"}, message])
    assert caught.value.status == 400
    return caught.value


def test_messages_are_normalised_for_the_template() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "system", "content": "in the middle"},
        {"role": "user", "content": "d", "name": "ann", "tool_call_id": None},
    ]
    assert read_messages(messages) == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "ab"),
        ChatMessage("assistant", "c"),
        ChatMessage("system", "in the middle"),
        ChatMessage("user", "d", "ann"),
    )


def test_a_call_and_its_result_arrive_with_the_arguments_as_an_object() -> None:
    messages = [
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [call(index=0, function={"name": "f", "arguments": '{"b": 1, "a": [2.5]}'})],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
    ]
    assert read_messages(messages) == (
        ChatMessage(
            "assistant", None, reasoning="hm", tool_calls=(MadeCall("c1", "f", {"b": 1, "a": [2.5]}),)
        ),
        ChatMessage("tool", "ok", tool_call_id="c1"),
    )


def test_what_the_official_client_hands_back_is_taken() -> None:
    thought = {"reasoning": "r", "reasoning_content": "r"}
    answer = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [call()], **thought}
    )
    (message,) = read_messages([json.loads(answer.model_dump_json())])
    assert message == ChatMessage("assistant", None, reasoning="r", tool_calls=(MadeCall("c1", "f", {}),))


def test_a_result_whose_call_was_cut_away_is_taken() -> None:
    (message,) = read_messages([{"role": "tool", "tool_call_id": "gone", "content": "x"}])
    assert message.tool_call_id == "gone"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": {"b": null}}', {"a": {"b": None}}),
        ("", {}),
        ("  \n", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ("5", "5"),
        ('{"a": ', '{"a": '),
        ('{"a": "\\ud800"}', '{"a": "\\ud800"}'),
        ('{"a":' * 5000 + "1" + "}" * 5000, '{"a":' * 5000 + "1" + "}" * 5000),
    ],
)
def test_arguments_that_are_no_object_stay_text(written: object, read: object) -> None:
    assert made(written) == read


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_arrives_under_either_name_and_may_be_all_there_is(name: str) -> None:
    (message,) = read_messages([{"role": "assistant", name: "hm"}])
    assert message == ChatMessage("assistant", None, reasoning="hm")
    (message,) = read_messages([{"role": "assistant", "content": "x", name: ""}])
    assert message == ChatMessage("assistant", "x")


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ("hi", "", 'an object like {"role": "user", "content": "…"}, not "hi"'),
        ({"content": "x"}, ".role", "system, developer, user, assistant, tool, not null"),
        ({"role": "bot", "content": "x"}, ".role", 'not "bot"'),
        ({"role": ["user"], "content": "x"}, ".role", 'not ["user"]'),
        ({"role": "function", "name": "f", "content": "x"}, ".role", 'send role "tool" with a tool_call_id'),
        ({"role": "user"}, ".content", "string or a list of text parts, not null"),
        ({"role": "assistant", "content": None}, ".content", "not null"),
        ({"role": "assistant", "tool_calls": []}, ".content", "not null"),
        ({"role": "tool", "tool_call_id": "c", "content": None}, ".content", "not null"),
        ({"role": "user", "content": 1}, ".content", "not 1"),
        ({"role": "user", "content": ["x"]}, ".content[0]", "an object like"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "a string, not null"),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content[0].type", '"image_url" is not'),
        ({"role": "user", "content": [{"type": "input_audio"}]}, ".content[0].type", "reads text parts only"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "txt": 1}]}, ".content[0].txt", "txt"),
        ({"role": "user", "content": "x", "name": 1}, ".name", "a string, not 1"),
        ({"role": "user", "content": "x", "colour": 1}, ".colour", "colour"),
        ({"role": "user", "content": "x", "cache_control": 1}, ".cache_control", "an object"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, ".tool_calls", 'role "assistant" only'),
        ({"role": "user", "content": "x", "reasoning": "r"}, ".reasoning", 'not to "user"; leave it out'),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, ".tool_call_id", 'role "tool" only'),
        ({"role": "assistant", "content": "x", "function_call": {}}, ".function_call", "send tool_calls"),
        ({"role": "assistant", "content": "x", "audio": {"id": "a"}}, ".audio", "reads text only"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, ".refusal", "send its text as content"),
        ({"role": "assistant", "reasoning": 1}, ".reasoning", "a string, not 1"),
        ({"role": "assistant", "reasoning": "a", "reasoning_content": "b"}, ".reasoning", "contradict"),
        ({"role": "tool", "content": "x"}, ".tool_call_id", "non-empty string, not null"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, ".tool_call_id", "not 5"),
        ({"role": "assistant", "tool_calls": {}}, ".tool_calls", "a list of calls, not {}"),
        ({"role": "assistant", "tool_calls": ["f"]}, ".tool_calls[0]", "an object like"),
        ({"role": "assistant", "tool_calls": [call(id="")]}, ".tool_calls[0].id", "non-empty string"),
        ({"role": "assistant", "tool_calls": [call(type="custom")]}, ".tool_calls[0].type", '"custom"'),
        ({"role": "assistant", "tool_calls": [call(extra=1)]}, ".tool_calls[0].extra", "extra"),
        ({"role": "assistant", "tool_calls": [call(function=1)]}, ".tool_calls[0].function", "not 1"),
        (
            {"role": "assistant", "tool_calls": [call(), call(function={"arguments": "{}"})]},
            ".tool_calls[1].function.name",
            "non-empty string, not null",
        ),
        (
            {"role": "assistant", "tool_calls": [call(function={"name": "f", "arguments": 5})]},
            ".tool_calls[0].function.arguments",
            'JSON text like "{}", not 5',
        ),
    ],
)  # fmt: skip
def test_what_a_message_may_not_hold_is_refused_by_name(message: object, param: str, says: str) -> None:
    err = refusal(message)
    assert err.code in ("invalid_request", "unsupported_parameter")
    assert err.param == f"messages[1]{param}"
    assert says in err.message


@pytest.mark.parametrize("value", [None, [], "hi", {}, 5])
def test_a_chat_without_messages_is_refused(value: object) -> None:
    with pytest.raises(ApiError, match="non-empty list") as caught:
        read_messages(value)
    assert caught.value.param == "messages"


def test_templates_get_the_dicts_that_they_are_written_for() -> None:
    calls = (MadeCall("c1", "f", {"a": 1}), MadeCall("c2", "g", "[1"))
    messages = (
        ChatMessage("system", "s"),
        ChatMessage("user", "u", "ann"),
        ChatMessage("assistant", None, reasoning="hm", tool_calls=calls),
        ChatMessage("tool", "42", tool_call_id="c2"),
        ChatMessage("tool", "43", "own", tool_call_id="c1"),
        ChatMessage("tool", "44", tool_call_id="gone"),
    )
    assert template_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "[1"}},
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "c2", "name": "g"},
        {"role": "tool", "content": "43", "tool_call_id": "c1", "name": "own"},
        {"role": "tool", "content": "44", "tool_call_id": "gone"},
    ]


@pytest.mark.parametrize(
    "head",
    [
        BILLING + "\n",
        BILLING,
        BILLING + "\r\n\r\n",
        BILLING.replace(" cch=eb6c6;", "") + "\n",
        USAGE + "\n",
        "Token usage: 12,345/200,000\n\n",
        "USD budget: $0.12/$5; $4.88 remaining\n",
        f"{BILLING}\n{USAGE}\n",
        f"{USAGE}\n{BILLING}\n",
        "",
    ],
)
def test_two_requests_that_differ_in_a_volatile_header_have_one_prefix(head: str) -> None:
    assert strip_volatile(head + "You are an agent.\n  Be brief.\n") == "You are an agent.\n  Be brief.\n"


@pytest.mark.parametrize(
    "text",
    [
        f"You are an agent.\n{BILLING}\n{USAGE}\n",
        f" {BILLING}",
        "Token usage: is what you watch",
        "Token usage: 12/100 is a lot",
        "\n\nhello",
        "x-anthropic-billing-header: what it is",
    ],
)
def test_what_is_no_known_header_or_not_at_the_head_stays(text: str) -> None:
    assert strip_volatile(text) == text


@given(st.text(max_size=40))
def test_stripping_takes_from_the_head_alone_and_once_for_all(text: str) -> None:
    stripped = strip_volatile(f"{BILLING}\n{text}")
    assert text.endswith(stripped)
    assert strip_volatile(stripped) == stripped


def test_a_header_of_ten_megabytes_is_read_in_one_pass() -> None:
    assert strip_volatile("x-anthropic-billing-header:" + " a=b;" * 2_000_000 + "\nhello") == "hello"
    endless = "x-anthropic-billing-header:" + " a=b" * 100_000
    assert strip_volatile(endless) == endless


def test_a_header_that_is_a_message_of_its_own_goes_with_it() -> None:
    messages = [
        ChatMessage("system", BILLING),
        ChatMessage("system", f"{USAGE}\nhello", "n"),
        ChatMessage("user", USAGE),
    ]
    assert template_messages(messages) == [
        {"role": "system", "content": "hello", "name": "n"},
        {"role": "user", "content": USAGE},
    ]
    assert template_messages([ChatMessage("system", BILLING)]) == [{"role": "system", "content": ""}]
    later = [ChatMessage("user", "hi"), ChatMessage("system", BILLING)]
    assert template_messages(later)[1]["content"] == BILLING
