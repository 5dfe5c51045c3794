"""Tools of a Responses request: as functions that a model can call, and the choice among them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from mlxpool.shared.api.asked import Asked
from mlxpool.shared.api.chat import ChatRequest
from mlxpool.shared.api.response_tools import ToolName, joined
from mlxpool.shared.api.responses import ResponseOwn, parse
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


def test_the_schema_of_each_tool_is_called_what_the_client_calls_it() -> None:
    heard = ask(
        tools=[{"type": "web_search"}, {**FUNCTION, "strict": True}, SPACE],
        input=[{"role": "user", "content": "x"},
               {"type": "additional_tools", "tools": [{"type": "function", "name": "late"}]}],
    )  # fmt: skip
    assert [tool.field_at(place) for place, tool in enumerate(heard.tools)] == [
        "tools[1].parameters",
        "tools[2].tools[0].parameters",
        "tools[2].tools[1].parameters",
        "input[1].tools[0].parameters",
    ]


def test_a_name_that_two_tools_have_is_said_with_its_namespace() -> None:
    other = {**SPACE, "name": "other"}
    choice = {"type": "function", "name": "find"}
    assert refusal(tools=[SPACE, other], tool_choice=choice).param == "tool_choice.name"
    named = ask(tools=[SPACE, other], tool_choice={**choice, "namespace": "other"}).tool_choice
    assert named == ToolChoice("one", "other__find")


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
        ({"tools": [{"type": f"hosted{place}"} for place in range(1025)]}, "tools", "at most 1024"),
        (
            {"tools": [{**SPACE, "tools": [{**FUNCTION, "name": f"f{place}"} for place in range(1025)]}]},
            "tools[0].tools",
            "1025 tools; at most 1024",
        ),
        (
            {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": [FUNCTION] * 1025}},
            "tool_choice.tools",
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
