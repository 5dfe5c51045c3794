"""The request of /v1/messages: blocks as messages, tools, thinking, betas, and the count of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mlxpool.shared.api.anthropic import Shown, parse, parse_count
from mlxpool.shared.api.anthropic_fields import ADVICE, FIELDS
from mlxpool.shared.api.asked import Asked
from mlxpool.shared.api.messages import ChatMessage, MadeCall
from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.tool_use_ids import encode
from mlxpool.shared.api.tools import ToolChoice
from mlxpool.shared.errors import ApiError

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "get", "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def body(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 4000, "messages": [USER], **fields}).encode()


def asked(**fields: Any) -> Asked:
    return parse(body(**fields))


def said(*messages: object, **fields: Any) -> list[ChatMessage]:
    return list(asked(messages=messages, **fields).request.messages)


def user(*blocks: object) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: object) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def result(content: object, call: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content, **more}


def call(call_id: str = "c1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "get", "input": given}


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


def attempt(read: Callable[[bytes], Asked], given: bytes) -> Asked | ApiError:
    try:
        return read(given)
    except ApiError as err:
        return err


def refused_block(*messages: object) -> ApiError:
    return refusal(messages=list(messages))


# Messages


def test_system_is_the_first_message_as_text_or_blocks() -> None:
    whole = [ChatMessage("system", "Be brief.\nAnswer."), ChatMessage("user", "hi")]
    assert said(USER, system="Be brief.\nAnswer.") == whole
    blocks = [text("Be brief.", cache_control={"type": "ephemeral"}), text("Answer.", citations=None)]
    assert said(USER, system=blocks) == whole
    assert said(USER, system=[]) == said(USER, system="") == [ChatMessage("user", "hi")]


def test_a_system_message_between_others_stays_there() -> None:
    assert said(USER, {"role": "system", "content": [text("Now in French.")]}, USER) == [
        ChatMessage("user", "hi"), ChatMessage("system", "Now in French."), ChatMessage("user", "hi"),
    ]  # fmt: skip


def test_results_and_text_of_one_message_keep_their_order() -> None:
    turn = assistant(call("c1", x=1), call("c2"))
    results = user(result("one"), result([text("two"), text("2")], "c2"), text("and now?"), text("Well?"))
    assert said(USER, turn, results)[2:] == [
        ChatMessage("tool", "one", tool_call_id="c1"),
        ChatMessage("tool", "two\n2", tool_call_id="c2"),
        ChatMessage("user", "and now?\nWell?"),
    ]


def test_text_before_a_result_comes_before_it() -> None:
    assert said(USER, assistant(call()), user(text("Here:"), result("one"), text("So?")))[2:] == [
        ChatMessage("user", "Here:"),
        ChatMessage("tool", "one", tool_call_id="c1"),
        ChatMessage("user", "So?"),
    ]


def test_what_an_assistant_thought_said_and_called_is_one_message() -> None:
    turn = assistant(
        {"type": "thinking", "thinking": "Hm.", "signature": "anything"},
        text("I look."), call("c1", x=1), text(" So."), call("c2"),
    )  # fmt: skip
    assert said(USER, turn, user(result("1"), result("2", "c2")))[1] == ChatMessage(
        "assistant",
        "I look. So.",
        None,
        "Hm.",
        (MadeCall("c1", "get", {"x": 1}), MadeCall("c2", "get", {})),
    )


def test_an_assistant_that_only_called_said_nothing() -> None:
    assert said(USER, assistant(call()), user(result("1")))[1].content is None


def test_neighbours_of_one_role_stay_apart() -> None:
    assert said(USER, USER) == [ChatMessage("user", "hi")] * 2


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (result("gone", is_error=True), "Error: gone"),
        (result("", is_error=True), "Error"),
        (result("fine", is_error=False), "fine"),
        ({"type": "tool_result", "tool_use_id": "c1"}, ""),
        (result([{"type": "tool_reference", "tool_name": "get"}]), "get"),
    ],
)
def test_a_result_says_whether_it_failed(given: dict[str, Any], shown: str) -> None:
    assert said(USER, assistant(call()), user(given))[2].content == shown


@pytest.mark.parametrize("kind", ["image", "document", "container_upload", "search_result"])
def test_media_is_refused_by_its_place_and_type(kind: str) -> None:
    refused = refused_block(USER, user(text("see"), {"type": kind, "source": {"type": "base64"}}))
    assert refused.param == "messages[1].content[1].type"
    assert kind in refused.message
    assert "reads text only" in refused.message
    inside = refused_block(USER, assistant(call()), user(result([{"type": kind}])))
    assert inside.param == "messages[2].content[0].content[0].type"


def test_what_only_another_server_can_read_is_left_out_and_told() -> None:
    turn = assistant(
        {"type": "redacted_thinking", "data": "xyz"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        text("Found."),
    )
    found = asked(messages=[USER, turn, USER])
    assert found.request.messages[1] == ChatMessage("assistant", "Found.")
    assert found.warnings == (
        "messages[1].content[0]: only the server that wrote redacted_thinking can read it; it was left out",
        "messages[1].content[1]: server_tool_use is of another server; it was left out",
        "messages[1].content[2]: web_search_tool_result is of another server; it was left out",
    )


@pytest.mark.parametrize("kind", ["mcp_tool_use", "mcp_tool_listing", "fallback", "server_tool_use"])
def test_a_turn_of_another_servers_blocks_alone_is_none(kind: str) -> None:
    assert said(USER, assistant({"type": kind, "id": "s"}), USER) == [ChatMessage("user", "hi")] * 2
    assert said(USER, assistant({"type": kind}, text("")), USER) == [ChatMessage("user", "hi")] * 2
    nothing = refusal(messages=[assistant({"type": kind})])
    assert (nothing.param, "nothing that a model could answer" in nothing.message) == ("messages", True)


def test_a_hundred_thousand_blocks_that_are_left_out_are_told_in_one_sentence() -> None:
    found = asked(messages=[user(*[{"type": "server_tool_use"}] * 100_000, text("hi"))])
    assert found.request.messages == (ChatMessage("user", "hi"),)
    assert found.warnings == (
        "messages[0].content[0], messages[0].content[1], messages[0].content[2] and 99997 more: "
        "server_tool_use is of another server; it was left out",
    )


@pytest.mark.parametrize("content", ["", [], [text("")]])
def test_a_system_message_that_says_nothing_is_none(content: object) -> None:
    assert said(USER, {"role": "system", "content": content}, USER) == [ChatMessage("user", "hi")] * 2


def test_a_call_has_the_id_that_the_model_wrote_again() -> None:
    told = encode("functions.get:0")
    turn = said(USER, assistant(call(told)), user(result("1", told)))
    assert [made.id for made in turn[1].tool_calls] == ["functions.get:0"]
    assert turn[2].tool_call_id == "functions.get:0"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([7], "messages[0]"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "n"}], "messages[0].name"),
        ([user(7)], "messages[0].content[0]"),
        ([user({"text": "x"})], "messages[0].content[0].type"),
        ([user({"type": "audio"})], "messages[0].content[0].type"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([user(text("x", bold=True))], "messages[0].content[0].bold"),
        ([user(text("x", cache_control="on"))], "messages[0].content[0].cache_control"),
        ([user(text("x", citations={"enabled": True}))], "messages[0].content[0].citations"),
        ([user(call())], "messages[0].content[0].type"),
        ([USER, assistant(result("x"))], "messages[1].content[0].type"),
        ([user({"type": "tool_result"})], "messages[0].content[0].tool_use_id"),
        ([user(result("x", is_error="no"))], "messages[0].content[0].is_error"),
        ([USER, assistant({"type": "thinking"})], "messages[1].content[0].thinking"),
        ([USER, assistant({"type": "tool_use", "name": "n"})], "messages[1].content[0].id"),
        ([USER, assistant({**call(), "input": "x"})], "messages[1].content[0].input"),
        ([USER, assistant(call())], "messages"),
    ],
)
def test_a_message_that_is_none_is_refused_where_it_is_wrong(messages: object, param: str) -> None:
    assert refusal(messages=messages).param == param


# The beginning of an answer


def test_a_last_message_of_the_assistants_is_the_beginning_of_the_answer() -> None:
    assert asked(messages=[USER, assistant(text("The best is ("))]).request.continues
    assert not asked(messages=[USER, assistant(text("yes")), USER]).request.continues


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("thinking", {"type": "enabled", "budget_tokens": 1024}, "thinking"),
        ("output_format", {"type": "json_schema", "schema": SCHEMA}, "output_format"),
        ("guided_regex", "a", "guided_regex"),
        ("chat_template_kwargs", {"enable_thinking": True}, "chat_template_kwargs"),
    ],
)
def test_the_beginning_of_an_answer_goes_with_nothing_that_comes_before_or_holds_it(
    field: str, value: object, param: str
) -> None:
    assert refusal(messages=[USER, assistant(text("{"))], **{field: value}).param == param


def test_a_template_that_is_told_not_to_think_takes_the_beginning_of_an_answer() -> None:
    fields = {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": False}}
    assert asked(messages=[USER, assistant(text("{"))], **fields).request.continues


# Tools


def test_tools_are_shown_to_the_model_as_chats_are() -> None:
    tool = {**TOOL, "description": "Gets.", "type": "custom", "cache_control": {"type": "ephemeral"},
            "eager_input_streaming": True, "defer_loading": False, "strict": True}  # fmt: skip
    (found,) = asked(tools=[tool]).request.tools
    assert found.strict
    assert found.field == "tools[0].input_schema"
    assert found.written == {
        "type": "function",
        "function": {"name": "get", "description": "Gets.", "parameters": TOOL["input_schema"]},
    }


def test_tools_of_anthropics_servers_are_left_out_and_told() -> None:
    found = asked(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, TOOL])
    assert [tool.name for tool in found.request.tools] == ["get"]
    assert found.warnings == (
        "tools[0]: web_search_20250305 is a tool that this server doesn't run; it was left out",
    )


@pytest.mark.parametrize(
    "kind", ["memory", "memory_20250818", "tool_search_tool_bm25_20251119", "mcp_toolset"]
)
def test_a_hosted_tool_is_told_by_its_name_with_or_without_a_date(kind: str) -> None:
    assert asked(tools=[{"type": kind, "name": "x"}, TOOL]).request.tools[0].name == "get"


@pytest.mark.parametrize("kind", ["memory_mine", "memory_2025", "advisors", "web_search_20250305x"])
def test_a_tool_whose_type_only_begins_like_a_hosted_one_is_refused(kind: str) -> None:
    refused = refusal(tools=[{"type": kind, "name": "x"}])
    assert (refused.code, refused.param) == ("unsupported_parameter", "tools[0].type")


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "computer_20250124", "browser"])
def test_a_tool_that_the_client_runs_without_a_schema_is_refused_by_place_and_type(kind: str) -> None:
    refused = refusal(tools=[TOOL, {"type": kind, "name": "bash"}])
    assert refused.param == "tools[1].type"
    assert kind in refused.message
    assert "input_schema" in refused.message


@pytest.mark.parametrize(
    ("choice", "read", "parallel"),
    [
        (None, ToolChoice(), True),
        ({"type": "auto"}, ToolChoice(), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice(), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "tool", "name": "get"}, ToolChoice("one", "get"), True),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_the_choice_of_tools(choice: object, read: ToolChoice, parallel: bool) -> None:
    request = asked(tools=[TOOL], tool_choice=choice).request
    assert (request.tool_choice, request.parallel_tool_calls) == (read, parallel)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [{**TOOL, "parameters": {}}]}, "tools[0].parameters"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "put"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "get"}}, "tool_choice.name"),
    ],
)
def test_wrong_tools_are_refused_where_they_are_wrong(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


# Options


@pytest.mark.parametrize(
    ("given", "enabled", "budget", "shown"),
    [
        (None, None, None, True),
        ({"type": "disabled"}, False, None, True),
        ({"type": "adaptive"}, True, None, True),
        ({"type": "adaptive", "display": "omitted"}, True, None, False),
        ({"type": "enabled", "budget_tokens": 2048, "display": "summarized"}, True, 2048, True),
    ],
)
def test_thinking(given: object, enabled: bool | None, budget: int | None, shown: bool) -> None:
    found = asked(thinking=given)
    assert (found.request.thinking, found.request.thinking_budget) == (enabled, budget)
    assert found.own == Shown(thinking=shown)


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ("on", "thinking", "object"),
        ({"type": "on"}, "thinking.type", "enabled, disabled, adaptive"),
        ({"type": "enabled"}, "thinking.budget_tokens", "missing"),
        ({"type": "enabled", "budget_tokens": 1023}, "thinking.budget_tokens", "1024 or more, not 1023"),
        ({"type": "enabled", "budget_tokens": 4000}, "thinking.budget_tokens", "less than max_tokens 4000"),
        ({"type": "disabled", "budget_tokens": 2000}, "thinking.budget_tokens", "unknown field"),
        ({"type": "adaptive", "display": "all"}, "thinking.display", "summarized, omitted"),
    ],
)
def test_thinking_that_can_not_be_is_refused(given: object, param: str, words: str) -> None:
    refused = refusal(thinking=given)
    assert refused.param == param
    assert words in refused.message


@pytest.mark.parametrize(
    ("effort", "read"), [("low", "low"), ("xhigh", "xhigh"), ("max", "xhigh"), (None, None)]
)
def test_effort_is_how_deep_the_model_reasons(effort: str | None, read: str | None) -> None:
    assert asked(output_config={"effort": effort}).request.reasoning_effort == read


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_schema_for_the_answer_is_enforced_or_refused(field: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    fields = {field: {"format": form} if field == "output_config" else form}
    name = "output_config.format" if field == "output_config" else field
    assert asked(**fields).request.structure == Structure("json_schema", name, SCHEMA, strict=True)


def test_two_forms_that_differ_contradict_each_other() -> None:
    one, two = ({"type": "json_schema", "schema": {"type": kind}} for kind in ("object", "array"))
    assert asked(output_format=one, output_config={"format": one}).request.structure is not None
    assert refusal(output_format=one, output_config={"format": two}).param == "output_format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 3}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"output_config": {"effort": "minimal"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"verbosity": "low"}}, "output_config.verbosity"),
        ({"metadata": "me"}, "metadata"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"logprobs": True}, "logprobs"),
        ({"n": 2}, "n"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "context_management.edits[0]"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
         "context_management.edits[0]"),
        ({"betas": "one"}, "betas"),
        ({"fallback_credit_token": "t"}, "fallback_credit_token"),
        ({"billing_policy": {"type": "x"}}, "billing_policy"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
    ],
)  # fmt: skip
def test_what_is_not_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "u"}}, {"service_tier": "auto"}, {"container": None}, {"mcp_servers": []},
        {"betas": ["interleaved-thinking-2025-05-14"]}, {"cache_control": {"type": "ephemeral"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"fallback_credit_token": None}, {"output_config": {"task_budget": None}},
        {"inference_geo": "eu"}, {"speed": "standard"}, {"stop_sequences": None}, {"tools": []},
    ],
)  # fmt: skip
def test_what_changes_nothing_passes(fields: dict[str, Any]) -> None:
    assert asked(**fields) == asked()


@pytest.mark.parametrize("field", sorted(ADVICE))
def test_a_field_of_another_protocol_is_refused_with_what_to_send(field: str) -> None:
    assert field not in FIELDS
    assert f"send {ADVICE[field]} instead" in refusal(**{field: [1]}).message


def test_the_schema_of_a_message_lets_pass_what_is_read() -> None:
    schema = FIELDS["messages"].schema
    assert schema is not None
    properties = schema["items"]["properties"]
    for name, value in {"role": "user", "content": "x", "cache_control": {"type": "ephemeral"}}.items():
        assert name in properties
        assert asked(messages=[{**USER, name: value}])
    assert refusal(messages=[{**USER, "extra": 1}]).param == "messages[0].extra"


def test_every_field_has_a_schema_for_the_servers_own_description() -> None:
    assert [name for name, field in FIELDS.items() if field.schema is None] == []


# Counting


def test_a_count_needs_no_limit_and_shows_the_model_the_same() -> None:
    fields = {"system": "s", "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 9000}}
    counted = parse_count(json.dumps({"messages": [USER], **fields}).encode()).request
    answered = asked(max_tokens=10_000, **fields).request
    shown = ("messages", "tools", "tool_choice", "thinking", "continues")
    assert [getattr(counted, name) for name in shown] == [getattr(answered, name) for name in shown]


def test_a_count_of_a_whole_requests_body_is_a_count_of_that_request() -> None:
    assert parse_count(body()).request.messages == asked().request.messages


@pytest.mark.parametrize(
    "last",
    [
        assistant({"type": "thinking", "thinking": "t", "signature": "s"}, text("done")),
        assistant(call()),
        assistant({"type": "thinking", "thinking": "t", "signature": "s"}),
        assistant(text("")),
    ],
)
def test_a_finished_turn_is_counted_though_no_answer_could_go_on_from_it(last: dict[str, Any]) -> None:
    fields = {"messages": [USER, last], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    counted = parse_count(json.dumps(fields).encode()).request
    assert [message.role for message in counted.messages] == ["user", "assistant"]
    assert not counted.continues
    assert refusal(**fields).status == 400


def test_a_count_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ApiError) as caught:
        parse_count(body(stop="x"))
    assert caught.value.param == "stop"


@pytest.mark.parametrize("field", sorted(name for name, row in FIELDS.items() if row.status != "accepted"))
@pytest.mark.parametrize("value", [{"a": [1]}, [[[]]], 1e308, -(2**70), "\x00", True], ids=str)
def test_a_value_of_any_type_is_read_or_refused(field: str, value: object) -> None:
    for read in (parse, parse_count):
        found = attempt(read, body(**{field: value}))
        if isinstance(found, ApiError):
            assert found.status == 400
            assert found.param is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"metadata": {"nope": 1}}, "metadata.nope"),
        ({"cache_control": {"type": 7}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": []}}, "cache_control.ttl"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}, "cache_control": 0}]},
         "tools[0].cache_control"),
        ({"system": [{"type": "text", "text": "x", "cache_control": {}}]}, "system[0].cache_control.type"),
    ],
)  # fmt: skip
def test_a_value_without_effect_is_still_one_of_its_kind(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields).param == param
