"""The Responses schema: every field is honoured, accepted for a reason, or refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.shared.api.asked import Asked
from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.api.messages import ChatMessage, MadeCall
from mlxpool.shared.api.response_fields import ADVICE, FIELDS
from mlxpool.shared.api.response_input import SUMMARY
from mlxpool.shared.api.response_object import compaction, new_response, seal
from mlxpool.shared.api.response_tools import ToolName, joined
from mlxpool.shared.api.responses import ResponseOwn, parse
from mlxpool.shared.api.structure import Structure
from mlxpool.shared.api.tools import ToolChoice
from mlxpool.shared.errors import ApiError

FUNCTION: dict[str, Any] = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Patches"}
SPACE: dict[str, Any] = {
    "type": "namespace", "name": "mcp__mail", "description": "Your mail", "tools": [
        {"type": "function", "name": "find", "description": "Finds"}, {"type": "function", "name": "send"},
    ],
}  # fmt: skip
SCHEMA = {"type": "object"}


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
}
# Honoured elsewhere: by the parent, or tested below.
ELSEWHERE = {"previous_response_id", "store", "background", "stream_options", "tools", "tool_choice"}

REFUSED: dict[str, tuple[object, list[object]]] = {
    "truncation": ("auto", ["disabled"]),
    "max_tool_calls": (3, []),
    "prompt": ({"id": "pmpt_1"}, []),
    "conversation": ("conv_1", []),
    "n": (2, [1]),
    "adapter": ("a", ["none"]),
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


@pytest.mark.parametrize("nested", [False, True])
def test_a_schema_is_read_and_echoed_also_where_chat_has_it(nested: bool) -> None:
    inner = {"name": "n", "schema": SCHEMA, "strict": True}
    form = {"type": "json_schema", **({"json_schema": inner} if nested else inner)}
    heard = asked(text={"format": form})
    assert heard.request.structure == Structure("json_schema", "text.format", SCHEMA, strict=True)
    made = new_response(heard.own.fields, id="resp_1", created=1, model="m")
    assert made["text"]["format"] == {"type": "json_schema", **inner, "description": None}


# Items.


def said(*items: object, **fields: object) -> tuple[ChatMessage, ...]:
    return ask(input=[*items], **fields).messages


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (USER, ChatMessage("user", "hi")),
        ({"type": "message", **USER, "id": "msg_1", "status": "completed"}, ChatMessage("user", "hi")),
        ({"role": "system", "content": "s"}, ChatMessage("system", "s")),
        ({"role": "developer", "content": "d"}, ChatMessage("system", "d")),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
            ChatMessage("user", "ab"),
        ),
        (
            {
                "type": "message", "role": "assistant", "id": "msg_1", "phase": "commentary",
                "internal_chat_message_metadata_passthrough": {"turn_id": "t"},
                "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
            },
            ChatMessage("assistant", "a"),
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            ChatMessage("assistant", "No."),
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            ChatMessage("tool", "r", tool_call_id="c"),
        ),
        (
            {
                "type": "custom_tool_call_output", "call_id": "c",
                "output": [{"type": "input_text", "text": "r"}],
            },
            ChatMessage("tool", "r", tool_call_id="c"),
        ),
        (
            {"type": "function_call_output", "name": "f", "namespace": "ns", "output": "r"},
            ChatMessage("tool", "r", "ns__f"),
        ),
        (compaction("cmp_1", "They met."), ChatMessage("user", f"{SUMMARY}They met.")),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "namespace": "ns", "arguments": '{"a":1}'},
            ChatMessage("assistant", None, tool_calls=(MadeCall("c", "ns__f", {"a": 1}),)),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "*** x"},
            ChatMessage("assistant", None, tool_calls=(MadeCall("c", "p", {"input": "*** x"}),)),
        ),
        (
            {"type": "reasoning", "id": "rs", "summary": [], "content": [
                {"type": "reasoning_text", "text": "hm"}, {"type": "reasoning_text", "text": "m"},
            ]},
            ChatMessage("assistant", None, reasoning="hmm"),
        ),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}],
             "encrypted_content": seal("long")},
            ChatMessage("assistant", None, reasoning="long"),
        ),
        (
            {"type": "reasoning", "summary": [
                {"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"},
            ]},
            ChatMessage("assistant", None, reasoning="a\n\nb"),
        ),
    ],
)  # fmt: skip
def test_an_item_is_a_message(item: dict[str, object], message: ChatMessage) -> None:
    assert said(item) == (message,)


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SPOKEN = {"type": "message", "role": "assistant", "content": "Look."}
MADE = MadeCall("c", "f", {})


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([THOUGHT, SPOKEN, CALL, CALL], [ChatMessage("assistant", "Look.", None, "hm", (MADE, MADE))]),
        (
            [THOUGHT, CALL, RESULT, THOUGHT, SPOKEN],
            [
                ChatMessage("assistant", None, None, "hm", (MADE,)),
                ChatMessage("tool", "r", tool_call_id="c"),
                ChatMessage("assistant", "Look.", None, "hm"),
            ],
        ),
        ([SPOKEN, SPOKEN], [ChatMessage("assistant", "Look.")] * 2),
        ([SPOKEN, CALL, SPOKEN], [ChatMessage("assistant", "Look.Look.", None, None, (MADE,))]),
        (
            [CALL, {"type": "web_search_call", "id": "ws"}, CALL],
            [ChatMessage("assistant", None, None, None, (MADE, MADE))],
        ),
    ],
)
def test_the_items_of_one_turn_are_one_message(items: list[object], messages: list[ChatMessage]) -> None:
    assert said(USER, *items, USER) == (ChatMessage("user", "hi"), *messages, ChatMessage("user", "hi"))


def test_instructions_and_the_developers_first_messages_are_one_system_message() -> None:
    developer = {"role": "developer", "content": "Dev"}
    assert said(developer, USER, developer, instructions="Be.") == (
        ChatMessage("system", "Be.\n\nDev"), ChatMessage("user", "hi"), ChatMessage("system", "Dev"),
    )  # fmt: skip
    assert said(developer, developer, USER)[:2] == (ChatMessage("system", "Dev"),) * 2


def test_what_nobody_here_can_read_is_left_out_and_told_once() -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    heard = asked(input=[*[foreign] * 6, USER, {"type": "mcp_call", "id": "m"}])
    assert heard.request.messages == (ChatMessage("user", "hi"),)
    assert heard.warnings == (
        "input[0], input[1], input[2] and 3 more: reasoning whose encrypted_content this server did not make "
        "can't be read",
        "input[7]: mcp_call is of a tool that this server doesn't run; it was left out",
    )


@pytest.mark.parametrize(
    ("item", "param", "says"),
    [
        ("x", "input[1]", "an object like"),
        ({"type": "telepathy"}, "input[1].type", '"telepathy" is not supported'),
        ({"type": 3}, "input[1].type", "not 3"),
        ({"id": "msg_1"}, "input[1]", 'item_reference "msg_1"'),
        ({"type": "item_reference", "id": "msg_1"}, "input[1]", "send the item itself"),
        ({"role": "tool", "content": "x"}, "input[1].role", "function_call_output"),
        ({"role": "robot", "content": "x"}, "input[1].role", 'not "robot"'),
        ({"role": "user"}, "input[1].content", "a string or a list of text parts, not null"),
        ({"role": "user", "content": "x", "contnet": "y"}, "input[1].contnet", "did you mean content?"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]},
            "input[1].content[0].type",
            '"input_image" is not supported: this model reads text parts only',
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
            "input[1].output[0].type",
            '"input_image"',
        ),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id", "non-empty string"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[1].name", "non-empty string"),
        ({"type": "function_call", "name": "f"}, "input[1].call_id", "non-empty string"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input[1].input", "a string, not null"),
        ({"type": "reasoning", "content": "x"}, "input[1].content", "a list of parts"),
        ({"type": "reasoning", "content": [{"type": "x"}]}, "input[1].content[0].type", "reasoning_text"),
        ({"type": "compaction"}, "input[1].encrypted_content", "non-empty string"),
        ({"type": "compaction", "encrypted_content": "gA"}, "input[1].encrypted_content", "did not make it"),
        (
            {"type": "compaction", "encrypted_content": seal("x")[:-1]},
            "input[1].encrypted_content",
            "did not make it",
        ),
    ],
)  # fmt: skip
def test_an_item_that_says_nothing_clear_is_refused_by_index(item: object, param: str, says: str) -> None:
    err = refusal(input=[USER, item])
    assert err.param == param
    assert says in err.message


def test_an_input_of_nothing_that_can_be_read_is_refused() -> None:
    assert "add a message" in refusal(input=[{"type": "web_search_call"}]).message


# Tools.


def test_a_function_is_shown_as_chat_shows_it_and_called_by_its_own_name() -> None:
    (tool,) = ask(tools=[{**FUNCTION, "strict": True, "description": "Looks"}]).tools
    assert tool.strict
    assert tool.written == {
        "type": "function",
        "function": {
            "name": "look_up", "description": "Looks", "parameters": {"type": "object"}, "strict": True,
        },
    }  # fmt: skip
    assert own(tools=[FUNCTION]).names == {"look_up": ToolName("look_up")}
    assert not ask(tools=[FUNCTION]).tools[0].strict
    assert ask(tools=[{**FUNCTION, "strict": None}]).tools == ask(tools=[FUNCTION]).tools


def test_a_custom_tool_is_a_function_of_one_text_with_its_grammar_in_words() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    heard = asked(tools=[{**CUSTOM, "format": grammar}])
    (tool,) = heard.request.tools
    assert list(tool.parameters["properties"]) == tool.parameters["required"] == ["input"]
    assert tool.written["function"]["description"] == (
        'Patches\n\nThe input must match this lark grammar:\nstart: "a"'
    )
    assert "not enforced" in heard.warnings[0]
    assert own(tools=[CUSTOM]).names == {"patch": ToolName("patch", custom=True)}
    assert asked(tools=[{**CUSTOM, "format": {"type": "text"}}]).warnings == ()


def test_the_tools_of_a_namespace_have_joined_names_and_its_description_once() -> None:
    find, send = ask(tools=[SPACE]).tools
    assert (find.name, send.name) == ("mcp__mail__find", "mcp__mail__send")
    assert find.written["function"]["description"] == "Of the tools mcp__mail: Your mail\n\nFinds"
    assert "description" not in send.written["function"]
    assert own(tools=[SPACE]).names["mcp__mail__send"] == ToolName("send", "mcp__mail")


def test_a_joined_name_is_one_that_every_model_may_call() -> None:
    assert joined("mcp__mail__", "find") == joined("mcp__mail", "__find") == "mcp__mail__find"
    long = joined("a" * 128, "b" * 128)
    assert re.fullmatch(r"a{119}_[0-9a-f]{8}", long)
    assert long != joined("a" * 128, "c" * 128)
    assert joined(None, "f") == "f"


def test_tools_that_an_item_declares_can_be_called_too() -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [SPACE, CUSTOM]}
    tools = ask(input=[item, USER], tools=[FUNCTION]).tools
    assert [tool.name for tool in tools] == ["look_up", "mcp__mail__find", "mcp__mail__send", "patch"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "look_up"}, ToolChoice("one", "look_up")),
        ({"type": "custom", "name": "patch"}, ToolChoice("one", "patch")),
        (
            {"type": "function", "name": "find", "namespace": "mcp__mail"},
            ToolChoice("one", "mcp__mail__find"),
        ),
        ({"type": "function", "name": "find"}, ToolChoice("one", "mcp__mail__find")),
        ({"type": "function", "name": "mcp__mail__find"}, ToolChoice("one", "mcp__mail__find")),
    ],
)
def test_a_choice_of_tool(choice: object, expected: ToolChoice) -> None:
    request = ask(tools=[FUNCTION, CUSTOM, SPACE], tool_choice=choice)
    assert request.tool_choice == expected
    assert len(request.tools) == 4


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_shown(mode: str) -> None:
    allowed = [{"type": "custom", "name": "patch"}, {"type": "namespace", "name": "mcp__mail"}]
    heard = asked(
        tools=[FUNCTION, CUSTOM, SPACE],
        tool_choice={"type": "allowed_tools", "mode": mode, "tools": [*allowed, {"type": "mcp"}]},
    )
    assert [tool.name for tool in heard.request.tools] == ["patch", "mcp__mail__find", "mcp__mail__send"]
    assert heard.request.tool_choice.mode == mode
    assert heard.warnings == (
        "tool_choice.tools[2]: mcp is a tool that this server doesn't run; it was left out",
    )


ALLOWED: dict[str, Any] = {"type": "allowed_tools", "mode": "auto"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": {}}, "tools", "a list of tools, not {}"),
        ({"tools": ["f"]}, "tools[0]", "an object like"),
        ({"tools": [{"name": "f"}]}, "tools[0].type", "function or custom, not null"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools[0].function",
            "stand beside type",
        ),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", 'not "a b"'),
        ({"tools": [{**FUNCTION, "paramters": {}}]}, "tools[0].paramters", "did you mean parameters?"),
        ({"tools": [{**FUNCTION, "parameters": []}]}, "tools[0].parameters", "an object like"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name", "that of tools[0] too"),
        (
            {"tools": [{**FUNCTION, "name": "mcp__mail__find"}, SPACE]},
            "tools[1].tools[0].name",
            "that of tools[0] too",
        ),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar"}}]}, "tools[0].format.syntax", "lark, regex"),
        ({"tools": [{**SPACE, "tools": None}]}, "tools[0].tools", "a list of tools"),
        ({"tools": [{**SPACE, "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type", "function or custom"),
        (
            {"tools": [{**FUNCTION, "name": f"f{place}"} for place in range(1025)]},
            "tools",
            "1025 tools; at most 1024",
        ),
        ({"tool_choice": "any"}, "tool_choice", 'not "any"'),
        ({"tool_choice": 3}, "tool_choice", "an object like"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", '"web_search_preview"'),
        (
            {"tool_choice": {"type": "function", "name": "g"}, "tools": [FUNCTION]},
            "tool_choice.name",
            "doesn't declare as function; look_up would work",
        ),
        (
            {"tool_choice": {"type": "custom", "name": "look_up"}, "tools": [FUNCTION]},
            "tool_choice.name",
            "doesn't declare as custom",
        ),
        ({"tool_choice": {**ALLOWED, "tools": []}, "tools": [FUNCTION]}, "tool_choice.tools", "non-empty"),
        (
            {"tool_choice": {**ALLOWED, "tools": [{"type": "namespace", "name": "x"}]}, "tools": [FUNCTION]},
            "tool_choice.tools[0].name",
            '"x"',
        ),
        (
            {"tool_choice": {**ALLOWED, "mode": "none"}, "tools": [FUNCTION]},
            "tool_choice.mode",
            "auto or required",
        ),
    ],
)  # fmt: skip
def test_tools_that_can_not_be_are_refused_by_their_place(
    fields: dict[str, object], param: str, says: str
) -> None:
    err = refusal(**fields)
    assert err.param == param
    assert says in err.message


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
