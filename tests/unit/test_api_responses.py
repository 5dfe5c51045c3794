"""The Responses schema: every field is honoured, accepted for a reason, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from mlxpool.shared.api.asked import Asked
from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.api.messages import ChatMessage
from mlxpool.shared.api.response_fields import ADVICE, FIELDS
from mlxpool.shared.api.response_object import new_response
from mlxpool.shared.api.responses import ResponseOwn, parse
from mlxpool.shared.api.structure import Structure
from mlxpool.shared.errors import ApiError

FUNCTION: dict[str, Any] = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Patches"}
SPACE: dict[str, Any] = {
    "type": "namespace", "name": "mcp__mail", "description": "Your mail", "tools": [
        {"type": "function", "name": "find", "description": "Finds"}, {"type": "function", "name": "send"},
    ],
}  # fmt: skip
SCHEMA = {"type": "object"}
USER = {"role": "user", "content": "hi"}


def asked(**fields: object) -> Asked:
    return parse(json.dumps({"input": "hello", **fields}).encode())


def ask(**fields: object) -> ChatRequest:
    return asked(**fields).request


def own(**fields: object) -> ResponseOwn:
    held = asked(**fields).own
    assert isinstance(held, ResponseOwn)
    return held


def refusal(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as raised:
        asked(**fields)
    assert raised.value.status == 400
    return raised.value


# Of each honoured field of this protocol a value, with what it needs beside it, and what then differs.
HONOURED: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "model": ({"model": "m"}, {"model": "m"}),
    "input": ({"input": "x"}, {"messages": (ChatMessage("user", "x"),)}),
    "instructions": (
        {"instructions": "Be."},
        {"messages": (ChatMessage("system", "Be."), ChatMessage("user", "hello"))},
    ),
    "max_output_tokens": ({"max_output_tokens": 5.0}, {"max_tokens": 5}),
    "stream": ({"stream": True}, {"stream": True}),
    "temperature": ({"temperature": 1}, {"temperature": 1.0}),
    "top_p": ({"top_p": 0.5}, {"top_p": 0.5}),
    "top_k": ({"top_k": 3}, {"top_k": 3}),
    "min_p": ({"min_p": 0.1}, {"min_p": 0.1}),
    "seed": ({"seed": -1}, {"seed": -1}),
    "stop": ({"stop": "x"}, {"stop": ("x",)}),
    "repetition_penalty": ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    "repetition_context_size": ({"repetition_context_size": 0}, {"repetition_context": 0}),
    "presence_penalty": ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
    "presence_context_size": ({"presence_context_size": 9}, {"presence_context": 9}),
    "frequency_penalty": ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
    "frequency_context_size": ({"frequency_context_size": 7}, {"frequency_context": 7}),
    "xtc_probability": ({"xtc_probability": 1}, {"xtc_probability": 1.0}),
    "xtc_threshold": ({"xtc_threshold": 0.5}, {"xtc_threshold": 0.5}),
    "logit_bias": ({"logit_bias": {"17": 2.5}}, {"logit_bias": ((17, 2.5),)}),
    "top_logprobs": ({"top_logprobs": 3}, {"top_logprobs": 3}),
    "include": ({"include": ["message.output_text.logprobs"]}, {"top_logprobs": 0}),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    "text": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {"structure": Structure("json_schema", "text.format", SCHEMA, strict=True)},
    ),
    "reasoning": ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
    "thinking_budget": ({"thinking_budget": 9}, {"thinking_budget": 9}),
    "guided_grammar": (
        {"guided_grammar": 'root ::= "a"', "text": {"format": {"type": "json_object"}}},
        {"structure": Structure("grammar", "guided_grammar", 'root ::= "a"')},
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
    "adapter": ({"adapter": "a+b"}, {"adapter": "a+b"}),
}
# Honoured elsewhere: by the parent, or tested below.
ELSEWHERE = {"previous_response_id", "store", "background", "stream_options", "tools", "tool_choice"}

REFUSED: dict[str, tuple[object, list[object]]] = {
    "truncation": ("auto", ["disabled"]),
    "max_tool_calls": (3, []),
    "prompt": ({"id": "pmpt_1"}, []),
    "conversation": ("conv_1", []),
    "n": (2, [1]),
    "moderation": ({"model": "m"}, []),
}


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_an_honoured_field_changes_the_request(name: str) -> None:
    fields, changes = HONOURED[name]
    assert ask(**fields) == msgspec.structs.replace(ask(), **changes)


def test_every_field_of_the_table_is_tried() -> None:
    honoured = {name for name, field in FIELDS.items() if field.status == "honoured"}
    assert honoured == {*HONOURED} | ELSEWHERE
    assert {name for name, field in FIELDS.items() if field.status == "refused"} == {*REFUSED}
    assert not set(ADVICE) & set(FIELDS)
    assert all(field.schema is not None for field in FIELDS.values())


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_null_is_as_if_a_field_were_not_there(name: str) -> None:
    if name == "input":
        assert "input is missing" in refusal(input=None).message
    else:
        assert ask(**{name: None}) == ask()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    value, off = REFUSED[name]
    err = refusal(**{name: value})
    assert (err.code, err.param) == ("unsupported_parameter", name)
    for nothing in off:
        assert ask(**{name: nothing}) == ask()


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": []}, "input", "non-empty list of items, not []"),
        ({"input": 3}, "input", "not 3"),
        ({"instructions": ["x"]}, "instructions", "send a string"),
        ({"instructions": 3}, "instructions", "a string, not 3"),
        ({"max_output_tokens": 0}, "max_output_tokens", "1 or more, not 0"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", '"resp_1" is for the server'),
        ({"store": "yes"}, "store", 'true or false, not "yes"'),
        ({"background": 1}, "background", "true or false, not 1"),
        ({"stream_options": {}}, "stream_options", "stream: true only"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "leave it out",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            "stream_options.include_usage",
            "include_obfuscation",
        ),
        ({"text": "x"}, "text", "an object like"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", 'not "xml"'),
        ({"text": {"verbosity": "loud"}}, "text.verbosity", "low, medium, high"),
        ({"text": {"schema": {}}}, "text.schema", "known fields: "),
        ({"reasoning": "low"}, "reasoning", "an object like"),
        ({"reasoning": {"effort": "hihg"}}, "reasoning.effort", 'not "hihg"'),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary", "auto, concise, detailed"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context", "send auto"),
        ({"reasoning": {"budget": 3}}, "reasoning.budget", "known fields: "),
        ({"include": "x"}, "include", "a list of strings"),
        ({"include": ["reasoning.encrypted"]}, "include[0]", "reasoning.encrypted_content"),
        ({"top_logprobs": 21}, "top_logprobs", "not 21"),
        ({"metadata": {"a": 1}}, "metadata.a", "a string, not 1"),
        ({"metadata": ["a"]}, "metadata", "an object like"),
        ({"context_management": {}}, "context_management", "a list of objects"),
        ({"messages": []}, "messages", "send input instead"),
        ({"max_tokens": 3}, "max_tokens", "send max_output_tokens instead"),
        ({"response_format": {}}, "response_format", "send text.format instead"),
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_with_field_value_and_what_works(
    fields: dict[str, object], param: str, says: str
) -> None:
    err = refusal(**fields)
    assert err.param == param
    assert says in err.message


def test_what_is_taken_and_not_done_is_told() -> None:
    warned = asked(
        include=["web_search_call.action.sources"],
        text={"verbosity": "low"},
        context_management=[{"type": "compaction"}],
        tools=[{"type": "web_search"}, FUNCTION, {"type": "local_shell"}],
    ).warnings
    assert warned == (
        "tools[0]: web_search is a tool that this server doesn't run; it was left out",
        "tools[2]: local_shell is a tool that this server doesn't run; it was left out",
        "include[0]: web_search_call.action.sources is of what this server doesn't do",
        "context_management: nothing is compacted by itself",
        "text.verbosity: low is not built; say it in instructions",
    )
    assert asked(text={"verbosity": "medium"}, context_management=[], include=[]).warnings == ()


def test_the_writer_gets_what_is_echoed_and_what_was_included() -> None:
    assert own(store=False, metadata={"a": "b"}).fields == {"store": False, "metadata": {"a": "b"}}
    assert own(reasoning={"summary": "auto"}).summary
    assert own(reasoning={"generate_summary": "auto"}).summary
    assert not own(reasoning={"effort": "low"}).summary
    assert own(include=["reasoning.encrypted_content"]).sealed
    assert not own().sealed


def test_no_alternatives_ask_for_no_log_probabilities() -> None:
    assert ask(top_logprobs=0).top_logprobs is None
    assert ask(top_logprobs=3).top_logprobs == 3
    included = ["message.output_text.logprobs"]
    assert ask(include=included, top_logprobs=0).top_logprobs == 0
    assert ask(include=included).top_logprobs == 0
    assert "0 to 20" in FIELDS["top_logprobs"].values
    assert refusal(top_logprobs=-1).param == "top_logprobs"


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_regex": "a"}, "text.format"),
        ({"structured_outputs": {"json": SCHEMA}}, "text.format"),
    ],
)
def test_the_form_of_the_text_ranks_as_chats_response_format(other: dict[str, object], field: str) -> None:
    structure = ask(text={"format": {"type": "json_object"}}, **other).structure
    assert structure is not None
    assert structure.field == field


def test_an_object_made_of_an_unchecked_body_is_one_that_the_vendors_types_take() -> None:
    fields = {
        "background": "yes",
        "tools": [{"type": "namespace", "name": "n", "description": None, "tools": []}],
        "input": "x",
    }
    made = new_response(fields, id="resp_1", created=1, model="m")
    assert made["background"] is False
    assert made["tools"] == [{"type": "namespace", "name": "n", "description": "", "tools": []}]
    Response.model_validate(made, strict=False)


@pytest.mark.parametrize("nested", [False, True])
def test_a_schema_is_read_and_echoed_also_where_chat_has_it(nested: bool) -> None:
    inner = {"name": "n", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", **({"json_schema": inner} if nested else inner)}
    heard = asked(text={"format": form})
    assert heard.request.structure == Structure("json_schema", "text.format", SCHEMA, strict=True)
    made = new_response(heard.own.fields, id="resp_1", created=1, model="m")
    assert made["text"]["format"] == {"type": "json_schema", **inner, "description": None}


@pytest.mark.parametrize("place", ["body", "item", "tool", "metadata", "part", "kind", "tool kind", "name"])
def test_a_name_of_any_length_is_quoted_short(place: str) -> None:
    long = "x" * 1_000_000
    fields: dict[str, dict[str, object]] = {
        "body": {long: 1},
        "item": {"input": [{**USER, long: 1}]},
        "tool": {"tools": [{**FUNCTION, long: 1}]},
        "metadata": {"metadata": {long: 1}},
        "part": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", long: 1}]}]},
        "kind": {"input": [{"type": long}]},
        "tool kind": {"tools": [{"type": long}], "tool_choice": "required"},
        "name": {"tools": [{**FUNCTION, "name": long}]},
    }
    err = refusal(**fields[place])
    assert len(err.message) < 1000
    assert len(err.param or "") <= 81


words = st.sampled_from([
    "type", "function", "name", "arguments", "parameters", "object", "role", "user", "assistant", "tool",
    "id", "call_id", "content", "text", "json_schema", "json_object", "schema", "strict", "format", "message",
    "function_call", "function_call_output", "custom_tool_call", "reasoning", "summary", "summary_text",
    "reasoning_text", "encrypted_content", "compaction", "namespace", "tools", "custom", "grammar", "output",
    "input", "input_text", "output_text", "allowed_tools", "mode", "auto", "required", "effort", "low",
    "description", "additional_tools", "item_reference", "web_search",
])  # fmt: skip
shaped = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=5),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), shaped, max_size=3), shaped)
def test_any_body_is_a_request_or_a_400_that_names_a_field(fields: dict[str, object], item: object) -> None:
    refused = None
    try:
        parse(json.dumps({"input": [item], **fields}).encode())
    except ApiError as err:
        refused = err
    assert refused is None or (refused.status == 400 and refused.param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 200_000,
        b'{"input":' + b"[" * 200_000,
        b'{"input": "\\ud800"}',
        b'{"input": [' * 600,
    ],
)
def test_a_body_that_is_no_request_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        parse(body)
    assert (raised.value.status, raised.value.code) == (400, "invalid_request")
