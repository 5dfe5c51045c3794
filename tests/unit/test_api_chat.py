"""The chat schema: every field is honoured, accepted for a reason, or refused by name."""

from __future__ import annotations

import json
import re
import time
from inspect import signature
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared.api.chat import ChatRequest, parse
from mlxpool.shared.api.chat_fields import ADVICE, FIELDS
from mlxpool.shared.api.messages import ChatMessage
from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.template_kwargs import RESERVED
from mlxpool.shared.api.tools import Tool, ToolChoice
from mlxpool.shared.chat import _TEMPLATE_TOKENS, ChatTokenizer
from mlxpool.shared.errors import ApiError
from mlxpool.shared.template import ChatTemplate
from mlxpool.worker.request import plan

HELLO = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"key": {}}}},
}
DECLARED = Tool("look_up", TOOL["function"]["parameters"], TOOL, field="tools[0].function.parameters")

# behaviour.md, section 1, and the standard fields of the protocol around it.
DOCUMENTED = {
    "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "min_p", "seed", "repetition_penalty", "repetition_context_size", "presence_penalty",
    "presence_context_size", "frequency_penalty", "frequency_context_size", "xtc_probability",
    "xtc_threshold", "logit_bias", "logprobs", "top_logprobs", "stop", "tools", "tool_choice",
    "parallel_tool_calls", "response_format", "guided_grammar", "guided_regex", "guided_choice",
    "structured_outputs", "chat_template_kwargs", "reasoning_effort", "thinking_budget", "adapter", "n",
    "keep_alive", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier",
    "model",
}  # fmt: skip

# Of each honoured field a value, with what it needs beside it, and what then differs in the request.
HONOURED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "model": ({"model": "m"}, {"model": "m"}),
    "messages": (
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": (ChatMessage("user", "x"),)},
    ),
    "stream": ({"stream": True}, {"stream": True}),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "include_usage": True},
    ),
    "max_tokens": ({"max_tokens": 5.0}, {"max_tokens": 5}),
    "max_completion_tokens": ({"max_completion_tokens": 6}, {"max_tokens": 6}),
    "temperature": ({"temperature": 1}, {"temperature": 1.0}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}),
    "top_k": ({"top_k": 3}, {"top_k": 3}),
    "min_p": ({"min_p": 0.1}, {"min_p": 0.1}),
    "seed": ({"seed": -1}, {"seed": -1}),
    "stop": ({"stop": "x"}, {"stop": ("x",)}),
    "n": ({"n": 8, "stream": True}, {"n": 8, "stream": True}),
    "repetition_penalty": ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    "repetition_context_size": ({"repetition_context_size": 0}, {"repetition_context": 0}),
    "presence_penalty": ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    "presence_context_size": ({"presence_context_size": 9}, {"presence_context": 9}),
    "frequency_penalty": ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    "frequency_context_size": ({"frequency_context_size": 7}, {"frequency_context": 7}),
    "xtc_probability": ({"xtc_probability": 1}, {"xtc_probability": 1.0}),
    "xtc_threshold": ({"xtc_threshold": 0.5}, {"xtc_threshold": 0.5}),
    "logit_bias": ({"logit_bias": {"0": -100, "17": 2.5}}, {"logit_bias": ((0, -100.0), (17, 2.5))}),
    "logprobs": ({"logprobs": True}, {"top_logprobs": 0}),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 20}),
    "tools": ({"tools": [TOOL]}, {"tools": (DECLARED,)}),
    "tool_choice": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
        {"tools": (DECLARED,), "tool_choice": ToolChoice("one", "look_up")},
    ),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    "guided_grammar": (
        {"guided_grammar": 'root ::= "a"'},
        {"structure": Structure("grammar", "guided_grammar", 'root ::= "a"')},
    ),
    "response_format": (
        {"response_format": {"type": "json_object"}},
        {"structure": Structure("json_object", "response_format")},
    ),
    "structured_outputs": (
        {"structured_outputs": {"regex": "a+"}},
        {"structure": Structure("regex", "structured_outputs", "a+")},
    ),
    "guided_json": (
        {"guided_json": {"type": "array"}},
        {"structure": Structure("json_schema", "guided_json", {"type": "array"})},
    ),
    "guided_regex": ({"guided_regex": "a+"}, {"structure": Structure("regex", "guided_regex", "a+")}),
    "guided_choice": (
        {"guided_choice": ["a", "b"]},
        {"structure": Structure("choice", "guided_choice", ("a", "b"))},
    ),
    "chat_template_kwargs": (
        {"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": 1}},
        {"thinking": False, "template_kwargs": {"preserve_thinking": 1}},
    ),
    "reasoning_effort": ({"reasoning_effort": "minimal"}, {"reasoning_effort": "minimal"}),
    "thinking_budget": ({"thinking_budget": 7}, {"thinking_budget": 7}),
    "adapter": ({"adapter": "b+a"}, {"adapter": "b+a"}),
}

# One value of each refused field that asks for something, and the values that ask for nothing.
REFUSED: dict[str, tuple[object, list[object]]] = {
    "functions": ([{"name": "f"}], [[]]),
    "function_call": ({"name": "f"}, ["none", "auto"]),
    "modalities": (["audio"], [["text"]]),
    "audio": ({"voice": "x"}, []),
    "prediction": ({"type": "content"}, []),
    "web_search_options": ({}, []),
    "verbosity": ("low", ["medium"]),
    "moderation": ({}, []),
}
# Of each accepted field a value, and one of a wrong type.
ACCEPTED: dict[str, tuple[object, object]] = {
    "keep_alive": ("5m", "soon"), "user": ("u", 1), "metadata": ({"a": "b"}, "a"), "store": (True, "yes"),
    "service_tier": ("auto", 1), "prompt_cache_key": ("k", []), "safety_identifier": ("s", {}),
    "prompt_cache_retention": ("24h", 24), "prompt_cache_options": ({}, "on"),
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
    for status, known in (("honoured", HONOURED), ("refused", REFUSED), ("accepted", ACCEPTED)):
        assert {name for name, field in FIELDS.items() if field.status == status} == set(known)
    assert all(field.why and field.values for field in FIELDS.values())


@pytest.mark.parametrize("name", HONOURED)
def test_an_honoured_field_arrives_and_null_is_as_if_it_were_not_there(name: str) -> None:
    fields, arrived = HONOURED[name]
    assert ask(**fields) == msgspec.structs.replace(ask(), **arrived)
    if name != "messages":
        assert ask(**{name: None}) == ask()


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_is_not_built_is_refused_by_name_unless_it_is_off(name: str) -> None:
    on, off_values = REFUSED[name]
    err = refusal(**{name: on})
    assert (err.code, err.param) == ("unsupported_parameter", name)
    assert name in err.message
    for off in [None, *off_values]:
        assert ask(**{name: off}) == ask()


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_accepted_field_changes_nothing_but_has_its_type(name: str) -> None:
    right, wrong = ACCEPTED[name]
    assert ask(**{name: right}) == ask() == ask(**{name: None})
    err = refusal(**{name: wrong})
    assert (err.code, err.param) == ("invalid_request", name)
    assert json.dumps(wrong) in err.message


def test_the_defaults_that_the_table_states_are_the_plans() -> None:
    assert FIELDS["temperature"].default.endswith(f"else {plan.DEFAULT_TEMPERATURE:g}")
    assert FIELDS["top_p"].default.endswith(f"else {plan.DEFAULT_TOP_P:g}")
    assert FIELDS["repetition_penalty"].default == "the model's, else 1"
    assert FIELDS["xtc_threshold"].default == f"{plan.DEFAULT_XTC_THRESHOLD:g}"
    for name in ("repetition", "presence", "frequency"):
        assert FIELDS[f"{name}_context_size"].default == str(plan.DEFAULT_PENALTY_CONTEXT)


NAMES = {"type": "object", "properties": {}}


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
        ({"max_completion_tokens": -3}, "max_completion_tokens", "1 or more, not -3"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "5 and max_completion_tokens 6"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"seed": 2**64}, "seed", "seed must be from"),
        ({"stop": ""}, "stop", "non-empty string"),
        ({"stop": ["a", ""]}, "stop", "non-empty string"),
        ({"stop": [1]}, "stop", "non-empty string"),
        ({"stop": ["a"] * 17}, "stop", "17 strings; at most 16"),
        ({"stop": ["a" * 1025]}, "stop", "of 1025 characters; at most 1024"),
        ({"stream": "yes"}, "stream", 'true or false, not "yes"'),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true only"),
        ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "include_usage"),
        ({"model": 3}, "model", "a model's name"),
        ({"n": 0}, "n", "from 1 to 8, not 0"),
        ({"n": 9}, "n", "from 1 to 8, not 9"),
        ({"n": "2"}, "n", 'whole number, not "2"'),
        ({"repetition_penalty": 0}, "repetition_penalty", "more than 0 and at most 10, not 0"),
        ({"repetition_penalty": 10.5}, "repetition_penalty", "at most 10, not 10.5"),
        ({"repetition_context_size": -1}, "repetition_context_size", "0 or more, not -1"),
        ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2, not 2.1"),
        ({"presence_context_size": "20"}, "presence_context_size", 'whole number, not "20"'),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "from -2 to 2, not -2.1"),
        ({"frequency_context_size": 1.5}, "frequency_context_size", "whole number, not 1.5"),
        ({"xtc_probability": 1.1}, "xtc_probability", "from 0 to 1, not 1.1"),
        ({"xtc_threshold": 0.6}, "xtc_threshold", "from 0 to 0.5, not 0.6"),
        ({"logit_bias": [[1, 2]]}, "logit_bias", 'an object like {"42": -100}, not [[1,2]]'),
        ({"logit_bias": {"the": 1}}, "logit_bias", 'token ids like "42", not "the"'),
        ({"logit_bias": {"-1": 1}}, "logit_bias", 'not "-1"'),
        ({"logit_bias": {"1_0": 1}}, "logit_bias", 'not "1_0"'),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100, not 101"),
        ({"logit_bias": {"5": None}}, "logit_bias.5", "a number, not null"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1025 tokens; at most 1024"),
        ({"logprobs": 5}, "logprobs", "true or false, not 5"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from -1 to 20, not 21"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "from -1 to 20, not -2"),
        ({"logprobs": True, "top_logprobs": "3"}, "top_logprobs", 'whole number, not "3"'),
        ({"top_logprobs": 3}, "top_logprobs", "3 goes with logprobs: true only"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", "logprobs: true only"),
        ({"reasoning_effort": "hihg"}, "reasoning_effort", 'minimal, low, medium, high, xhigh, not "hihg"'),
        ({"reasoning_effort": True}, "reasoning_effort", "not true"),
        ({"reasoning_effort": 3}, "reasoning_effort", "not 3"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "true or false, not 1"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object like"),
        (
            {"chat_template_kwargs": {"enable_thinking": "no"}},
            "chat_template_kwargs.enable_thinking",
            'true or false, not "no"',
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "thinking": False}},
            "chat_template_kwargs.thinking",
            "contradict",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "sets messages itself"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self", "leave it out"),
        ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs.bos_token", "leave it out"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs.a b", "no name of a variable"),
        ({"chat_template_kwargs": {f"v{i}": 1 for i in range(65)}}, "chat_template_kwargs", "65 variables"),
        ({"keep_alive": True}, "keep_alive", "keep_alive is true; use seconds"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_with_field_value_and_what_works(
    fields: dict[str, object], param: str, says: str
) -> None:
    err = refusal(**fields)
    assert err.code in ("invalid_request", "unsupported_parameter")
    assert err.param == param
    assert says in err.message


_ANY_TYPE: list[object] = [True, 3, -1.5, "text", [1], {"a": 1}]


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_field(name: str) -> None:
    refused = []
    for value in _ANY_TYPE:
        try:
            ask(**{"stream": True, "tools": [TOOL], name: value})
        except ApiError as err:
            refused.append(err)
    assert len(refused) >= 3
    for err in refused:
        assert err.status == 400
        assert re.split(r"[.\[]", err.param or "")[0] == name
        assert name in err.message


@pytest.mark.parametrize("value", [-1, 0, None])
def test_unset_top_logprobs_ask_for_nothing(value: int | None) -> None:
    assert ask(top_logprobs=value) == ask(logprobs=False, top_logprobs=value) == ask()
    assert ask(logprobs=True, top_logprobs=value).top_logprobs == 0


def test_a_name_that_others_give_to_a_field_is_answered_with_the_one_to_send() -> None:
    err = refusal(enable_thinking=False)
    assert (err.code, err.param) == ("unsupported_parameter", "enable_thinking")
    assert "send chat_template_kwargs.enable_thinking instead" in err.message
    assert not set(ADVICE) & set(FIELDS)


def test_an_unknown_field_names_the_nearest_known_one() -> None:
    err = refusal(temprature=1)
    assert (err.code, err.param) == ("unsupported_parameter", "temprature")
    assert "did you mean temperature?" in err.message


def test_an_unknown_field_that_is_near_none_lists_what_may_be_sent_nearest_first() -> None:
    listed = refusal(stopped_by="x").message.removeprefix('unknown field "stopped_by"; known fields: ')
    names = listed.split(", ")
    assert "stop" in names[:2]
    assert sorted(names) == sorted(name for name, field in FIELDS.items() if field.status != "refused")


def test_a_field_that_would_be_refused_is_no_advice() -> None:
    assert "did you mean verbosity?" not in refusal(verbosit="low").message


def test_deprecated_functions_are_answered_with_what_to_send() -> None:
    assert "send tools instead" in refusal(functions=[{"name": "f"}]).message
    assert "send tool_choice instead" in refusal(function_call={"name": "f"}).message


@pytest.mark.parametrize("where", ["body", "message", "part", "stream_options", "tool", "kwargs"])
def test_a_field_with_a_long_name_is_named_by_its_beginning(where: str) -> None:
    long = {"x" * 5_000_000: 1}
    fields: dict[str, dict[str, object]] = {
        "body": {**long},
        "message": {"messages": [{"role": "user", "content": "x", **long}]},
        "part": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", **long}]}]},
        "stream_options": {"stream": True, "stream_options": {**long}},
        "tool": {"tools": [{**TOOL, **long}]},
        "kwargs": {"chat_template_kwargs": {" " + "x" * 5_000_000: 1}},
    }
    err = refusal(**fields[where])
    assert f"{'x' * 78}…" in err.message
    assert len(err.message) < 1000
    assert len(err.param or "") <= 81


def test_no_variable_of_a_client_meets_one_that_the_server_hands_to_the_template() -> None:
    own = {*signature(ChatTokenizer.render).parameters, *signature(ChatTemplate.render).parameters}
    assert own - {"variables"} <= RESERVED
    assert set(_TEMPLATE_TOKENS) <= RESERVED


DEEP_SCHEMA: dict[str, Any] = {"type": "object"}
for _ in range(400):
    DEEP_SCHEMA = {"type": "object", "properties": {"a": DEEP_SCHEMA}}


def test_a_schema_of_four_hundred_levels_is_read_for_its_compiler_to_judge() -> None:
    request = ask(response_format={"type": "json_schema", "json_schema": {"schema": DEEP_SCHEMA}})
    assert request.structure == Structure("json_schema", "response_format", DEEP_SCHEMA)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 200_000, b'{"messages":' + b"[" * 200_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"guided_json":' + b'{"a":' * 902 + b"1" + b"}" * 903,
        b'{"tools":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    ],
)  # fmt: skip
def test_a_body_that_is_no_request_is_a_400(body: bytes) -> None:
    assert refusal_of(body).code == "invalid_request"


@pytest.mark.parametrize("half", ["\\ud800", "\\udfff", "\\ud83dx", "\\ud83d\\ud83d", "x\\uDE00"])
@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "@"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "@"}]}]}',
        '{"messages": [{"role": "user", "content": "x", "name": "@"}]}',
        '{"messages": [{"role": "user", "content": "x"}], "stop": ["@"]}',
        '{"messages": [{"role": "user", "content": "x"}], "@": 1}',
        '{"messages": [{"role": "user", "content": "x"}], "guided_json": {"enum": ["@"]}}',
        '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": "@"}}',
    ],
)
def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(body: str, half: str) -> None:
    sent = body.replace("@", half).encode()
    err = refusal_of(sent)
    assert err.code == "invalid_request"
    # A pair before it is none.
    assert re.search(r"\\u[dD][89a-fA-F]\w\w at byte \d+ is half of a character", err.message), err.message
    assert parse(b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}').messages[0].content == "😀"


def test_a_quoted_value_stays_short() -> None:
    assert len(refusal(temperature="x" * 10_000).message) < 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# Names and words of the schema itself, so that what is drawn gets past the first check.
words = st.sampled_from([
    "type", "function", "name", "arguments", "parameters", "object", "role", "user", "assistant", "tool",
    "id", "tool_calls", "tool_call_id", "content", "text", "json_schema", "json_object", "schema", "strict",
    "json", "regex", "choice", "grammar", "enable_thinking",
    "thinking", "required", "auto", "{}", "[", '{"a": 1}',
])  # fmt: skip
shaped_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=5),
    max_leaves=15,
)


@given(
    st.dictionaries(st.sampled_from(sorted(FIELDS)), json_values | shaped_values, max_size=4),
    json_values | shaped_values | st.just(HELLO),
)
def test_any_json_is_a_request_or_a_400_soon(fields: dict[str, object], messages: object) -> None:
    body = msgspec.json.encode({"messages": messages, **fields})
    status = 200
    began = time.thread_time()
    try:
        parse(body)
    except ApiError as err:
        status = err.status
    assert status in (200, 400)
    assert time.thread_time() - began < 1
