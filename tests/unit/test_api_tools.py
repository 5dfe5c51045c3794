"""Tools that a chat declares, and the choice among them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.shared.api.tools import Tool, ToolChoice, read_choice, read_tools
from mlxpool.shared.errors import ApiError

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def function(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **fields}}


TOOLS = read_tools("tools", [function(), function(name="g")])


def test_a_tool_keeps_what_the_client_wrote_for_the_template() -> None:
    written = function(name="mcp__files.read:v2-x", description="reads", parameters=SCHEMA, strict=True)
    (tool,) = read_tools("tools", [written])
    assert tool == Tool(
        "mcp__files.read:v2-x", SCHEMA, written, strict=True, field="tools[0].function.parameters"
    )
    assert list(tool.written["function"]) == ["name", "description", "parameters", "strict"]


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_takes_none_and_templates_see_that(parameters: dict[str, Any]) -> None:
    (tool,) = read_tools("tools", [function(**parameters)])
    assert tool.parameters == NOTHING
    assert tool.written == function(parameters=NOTHING)


@pytest.mark.parametrize("value", [None, []])
def test_no_tools_are_no_tools(value: object) -> None:
    assert read_tools("tools", value) == ()


@pytest.mark.parametrize(
    ("tools", "param", "says"),
    [
        ({}, "tools", "a list of tools, not {}"),
        ([function(name=f"f{i}") for i in range(1025)], "tools", "1025 tools; at most 1024"),
        (["f"], "tools[0]", "an object like"),
        ([{"function": {"name": "f"}}], "tools[0].type", 'must be "function", not null'),
        ([function(), {"type": "web_search"}], "tools[1].type", 'not "web_search"'),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type", 'not "custom"'),
        ([{"type": "function"}], "tools[0].function", 'an object like {"name": "…"}, not null'),
        ([{"type": "function", "name": "f"}], "tools[0].name", "known fields: "),
        ([function(name="")], "tools[0].function.name", 'or _ . : -, not ""'),
        ([function(name=None)], "tools[0].function.name", "not null"),
        ([function(name="a b")], "tools[0].function.name", 'not "a b"'),
        ([function(name="f\n")], "tools[0].function.name", "not"),
        ([function(name="é")], "tools[0].function.name", 'not "é"'),
        ([function(name="x" * 129)], "tools[0].function.name", "1 to 128"),
        ([function(paramters={})], "tools[0].function.paramters", "did you mean parameters?"),
        ([function(description=1)], "tools[0].function.description", "a string, not 1"),
        ([function(strict="yes")], "tools[0].function.strict", 'true or false, not "yes"'),
        ([function(parameters="{}")], "tools[0].function.parameters", 'not "{}"'),
        ([function(parameters={"type": "array"})], "tools[0].function.parameters.type", 'not "array"'),
        ([function(), function()], "tools[1].function.name", '"f" is that of tools[0] too'),
    ],
)
def test_a_tool_of_a_wrong_shape_is_refused_by_its_place(tools: object, param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_tools("tools", tools)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("value", "choice"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "g"}}, ToolChoice("one", "g")),
    ],
)
def test_a_choice_is_read(value: object, choice: ToolChoice) -> None:
    assert read_choice("tool_choice", value, TOOLS) == choice


@pytest.mark.parametrize("value", [None, "auto", "none"])
def test_a_choice_that_forces_nothing_needs_no_tools(value: object) -> None:
    assert read_choice("tool_choice", value, ()).name is None


@pytest.mark.parametrize("value", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_can_be_forced_among_declared_tools_only(value: object) -> None:
    with pytest.raises(ApiError, match="declare them in tools") as caught:
        read_choice("tool_choice", value, ())
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        ("any", "tool_choice", 'one of none, auto, required, or {"type": "function"'),
        (True, "tool_choice", "not true"),
        ([], "tool_choice", "not []"),
        ({}, "tool_choice.type", "not null"),
        ({"type": "tool", "name": "f"}, "tool_choice.type", 'not "tool"'),
        ({"type": "allowed_tools"}, "tool_choice.type", "declare only those tools"),
        ({"type": "function"}, "tool_choice.function", "not null"),
        ({"type": "function", "name": "f"}, "tool_choice.name", "function"),
        ({"type": "function", "function": {}}, "tool_choice.function.name", "non-empty string"),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice.function.name", 'names "h"'),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice.function.name", "f, g would work"),
        ({"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice.function.x", "x"),
    ],
)
def test_a_choice_of_a_wrong_shape_is_refused(value: object, param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_choice("tool_choice", value, TOOLS)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert says in caught.value.message
