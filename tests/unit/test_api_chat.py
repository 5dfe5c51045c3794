"""The chat schema: every field is honoured, accepted for a reason, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared.api.chat import FIELDS, ChatMessage, ChatRequest, parse
from mlxpool.shared.errors import ApiError

HELLO = [{"role": "user", "content": "hello"}]

# behaviour.md, section 1, and the standard fields of the protocol around it.
DOCUMENTED = {
    "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "seed", "repetition_penalty", "repetition_context_size", "presence_penalty",
    "presence_context_size", "frequency_penalty", "frequency_context_size", "xtc_probability",
    "xtc_threshold", "logit_bias", "logprobs", "top_logprobs", "stop", "tools", "tool_choice",
    "parallel_tool_calls", "response_format", "guided_grammar", "guided_regex", "guided_choice",
    "structured_outputs", "chat_template_kwargs", "reasoning_effort", "adapter", "n", "keep_alive", "user",
    "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "model",
}  # fmt: skip

# One value of each refused field that asks for something, and the values that ask for nothing.
REFUSED: dict[str, tuple[object, list[object]]] = {
    "tools": ([{"type": "function", "function": {"name": "f"}}], [[]]),
    "tool_choice": ("required", ["none", "auto"]),
    "parallel_tool_calls": ("yes", [True, False]),
    "functions": ([{"name": "f"}], [[]]),
    "function_call": ({"name": "f"}, ["none", "auto"]),
    "response_format": ({"type": "json_object"}, [{"type": "text"}]),
    "guided_grammar": ("root ::= 'a'", []),
    "guided_regex": ("a+", []),
    "guided_choice": (["a"], []),
    "guided_json": ({}, []),
    "structured_outputs": ({"regex": "a"}, []),
    "logprobs": (True, [False]),
    "top_logprobs": (2, [0, -1]),
    "presence_penalty": (0.5, [0, 0.0]),
    "presence_context_size": (20, []),
    "frequency_penalty": (0.5, [0, 0.0]),
    "frequency_context_size": (20, []),
    "repetition_penalty": (1.1, [1, 1.0]),
    "repetition_context_size": (20, []),
    "logit_bias": ({"1": 5}, [{}]),
    "xtc_probability": (0.5, [0]),
    "xtc_threshold": (0.1, []),
    "n": (2, [1]),
    "chat_template_kwargs": ({"enable_thinking": False}, [{}]),
    "reasoning_effort": ("low", []),
    "adapter": ("a", ["none"]),
    "modalities": (["audio"], [["text"]]),
    "audio": ({"voice": "x"}, []),
    "prediction": ({"type": "content"}, []),
    "web_search_options": ({}, []),
    "verbosity": ("low", []),
}
ACCEPTED: dict[str, object] = {
    "keep_alive": "5m", "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
    "prompt_cache_key": "k", "safety_identifier": "s",
}  # fmt: skip


def ask(**fields: object) -> ChatRequest:
    return parse(json.dumps({"messages": HELLO, **fields}).encode())


def refusal(**fields: object) -> ApiError:
    return refusal_of(json.dumps({"messages": HELLO, **fields}).encode())


def refusal_of(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert caught.value.status == 400
    return caught.value


def test_the_table_holds_every_documented_field() -> None:
    assert set(FIELDS) >= DOCUMENTED
    assert {name for name, field in FIELDS.items() if field.status == "refused"} == set(REFUSED)
    assert {name for name, field in FIELDS.items() if field.status == "accepted"} == set(ACCEPTED)
    assert all(field.why for field in FIELDS.values() if field.status != "honoured")


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_built_is_refused_by_name_unless_it_is_off(name: str) -> None:
    on, off_values = REFUSED[name]
    err = refusal(**{name: on})
    assert (err.code, err.param) == ("unsupported_parameter", name)
    assert name in err.message
    for off in [None, *off_values]:
        assert ask(**{name: off}) == ask()


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_field_changes_nothing(name: str) -> None:
    assert ask(**{name: ACCEPTED[name]}) == ask()


def test_honoured_fields_arrive() -> None:
    request = ask(
        model="m", stream=True, stream_options={"include_usage": True}, max_tokens=5, temperature=1,
        top_p=0.5, top_k=3, min_p=0.1, seed=-1, stop="x",
    )  # fmt: skip
    assert request == ChatRequest(
        messages=(ChatMessage("user", "hello"),), model="m", stream=True, include_usage=True, max_tokens=5,
        temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, seed=-1, stop=("x",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": 2.5}, "temperature", "from 0 to 2, not 2.5"),
        ({"temperature": -0.1}, "temperature", "from 0 to 2"),
        ({"temperature": "1"}, "temperature", 'a number, not "1"'),
        ({"temperature": True}, "temperature", "a number, not true"),
        ({"top_p": 0}, "top_p", "more than 0 and at most 1, not 0"),
        ({"top_p": 1.01}, "top_p", "at most 1"),
        ({"top_k": -1}, "top_k", "0 or more, not -1"),
        ({"top_k": 1.5}, "top_k", "whole number"),
        ({"min_p": 2}, "min_p", "from 0 to 1"),
        ({"max_tokens": 0}, "max_tokens", "1 or more, not 0"),
        ({"max_tokens": "9"}, "max_tokens", "whole number"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens must be from 1 to"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "5 and max_completion_tokens 6"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"seed": 2**64}, "seed", "seed must be from"),
        ({"stop": ""}, "stop", "non-empty string"),
        ({"stop": ["a", ""]}, "stop", "non-empty string"),
        ({"stop": [1]}, "stop", "non-empty string"),
        ({"stop": ["a"] * 17}, "stop", "17 strings; at most 16"),
        ({"stream": "yes"}, "stream", 'true or false, not "yes"'),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true only"),
        ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
        ({"model": 3}, "model", "a model's name"),
        ({"messages": []}, "messages", "non-empty"),
        ({"messages": None}, "messages", "missing"),
        ({"messages": "hi"}, "messages", "non-empty list"),
        ({"messages": ["hi"]}, "messages[0]", "an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "system, developer, user, assistant"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", 'not "bot"'),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "string or a list of text parts"),
        ({"messages": [*HELLO, {"role": "user", "content": 1}]}, "messages[1].content", "not 1"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a"),
        ({"messages": [{"role": "user", "content": "x", "name": 1}]}, "messages[0].name", "a string"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_with_field_value_and_what_works(
    fields: dict[str, object], param: str, says: str
) -> None:
    err = refusal(**fields)
    assert err.code in ("invalid_request", "unsupported_parameter")
    assert err.param == param
    assert says in err.message


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([{"role": "tool", "content": "x"}], "messages[0].role", "tool"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls", "tool_calls"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "image_url"),
        ([{"role": "user", "content": "x", "colour": 1}], "messages[0].colour", "colour"),
    ],
)  # fmt: skip
def test_what_a_message_may_not_hold_yet_is_refused_by_name(
    messages: list[dict[str, Any]], param: str, says: str
) -> None:
    err = refusal(messages=messages)
    assert (err.code, err.param) == ("unsupported_parameter", param)
    assert says in err.message


def test_an_unknown_field_names_the_nearest_known_one() -> None:
    err = refusal(temprature=1)
    assert (err.code, err.param) == ("unsupported_parameter", "temprature")
    assert "did you mean temperature?" in err.message


def test_an_unknown_field_that_is_near_none_lists_what_may_be_sent_nearest_first() -> None:
    listed = refusal(stopping_text="x").message.removeprefix('unknown field "stopping_text"; known fields: ')
    names = listed.split(", ")
    assert names[:2] == ["stop", "store"]
    assert sorted(names) == sorted(name for name, field in FIELDS.items() if field.status != "refused")


def test_a_field_that_would_be_refused_is_no_advice() -> None:
    assert "did you mean logprobs?" not in refusal(logprob=True).message


def test_parallel_tool_calls_mean_nothing_without_tools() -> None:
    for value in (True, False, None):
        assert ask(parallel_tool_calls=value, tools=[]) == ask()
        err = refusal(parallel_tool_calls=value, tools=[{"type": "function"}])
        assert (err.code, err.param) == ("unsupported_parameter", "tools")


@pytest.mark.parametrize("where", ["body", "message", "part", "stream_options"])
def test_a_field_with_a_long_name_is_named_by_its_beginning(where: str) -> None:
    long = {"x" * 5_000_000: 1}
    fields: dict[str, dict[str, object]] = {
        "body": {**long},
        "message": {"messages": [{"role": "user", "content": "x", **long}]},
        "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **long}]}]},
        "stream_options": {"stream": True, "stream_options": {**long}},
    }
    err = refusal(**fields[where])
    assert err.code == "unsupported_parameter"
    assert f'unknown field "{"x" * 79}…' in err.message
    assert len(err.message) < 400
    assert len(err.param or "") <= 81


def test_messages_are_normalised_for_the_template() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": "d", "name": "ann"},
    ]
    assert ask(messages=messages).messages == (
        ChatMessage("system", "be brief"),
        ChatMessage("user", "ab"),
        ChatMessage("assistant", "c"),
        ChatMessage("user", "d", "ann"),
    )


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 200_000, b'{"messages":' + b"[" * 200_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_a_400(body: bytes) -> None:
    assert refusal_of(body).code == "invalid_request"


def test_a_quoted_value_stays_short() -> None:
    assert len(refusal(temperature="x" * 10_000).message) < 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), json_values, max_size=4), json_values)
def test_any_json_is_a_request_or_a_400(fields: dict[str, object], messages: object) -> None:
    body = msgspec.json.encode({"messages": messages, **fields})
    status = 200
    try:
        parse(body)
    except ApiError as err:
        status = err.status
    assert status in (200, 400)
