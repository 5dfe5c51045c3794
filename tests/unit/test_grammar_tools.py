"""Calls that must be made: what the grammar lets through is what the answer's readers read."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from mlxpool.shared.api.tools import Tool, ToolChoice
from mlxpool.shared.errors import ApiError
from mlxpool.worker.grammar.formats import Format, reasoning_of
from mlxpool.worker.grammar.spec import Demand, Enforced, decide, give_up
from mlxpool.worker.grammar.tools import CALLS_HIGH, FALLBACK_FAMILY, forced_family
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.events import Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool
from mlxpool.worker.text.marks import Marks, TokenText
from mlxpool.worker.text.tools.families import TOOL_FAMILY_NAMES
from tests.unit.grammar_world import MARKERS, TOKENS, takes, walk

PLAIN = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^.{0,3}$"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
}
RICH = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z]{2}$"},
        "where": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["code", "where"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


def tool(name: str, parameters: dict[str, Any], strict: bool = False) -> Tool:
    return Tool(name, parameters, {}, strict=strict)


TOOLS = (tool("weather", PLAIN), tool("lookup", RICH), tool("now", EMPTY))


def forced(*tools: Tool, **fields: Any) -> Demand:
    fields.setdefault("choice", ToolChoice("required"))
    return Demand(tools=tools, **fields)


def form_of(demand: Demand) -> tuple[Format, Enforced]:
    decision = decide(demand)
    assert isinstance(decision, Enforced)
    return json.loads(decision.spec.text)["format"], decision


def read_answer(tokens: list[int], family: str, demand: Demand, reasoning: str | None = None) -> list[Any]:
    """The calls (name, arguments) and other text that the readers make of an answer."""
    ids = demand.markers
    by_id = {token: text for text, token in ids.items()}
    marks = Marks(MARKERS, token_id=ids.get, is_special=by_id.__contains__)
    source = TokenText(ByteDetokeniser(lambda token: b"" if token >= 256 else TOKENS[token]), marks)
    answer = AnswerText(
        source,
        AnswerFormat(
            tools=family,
            reasoning=reasoning,
            starts_inside=demand.reasoning is not None and demand.reasoning.starts_inside,
            declared=tuple(DeclaredTool(tool.name, tool.parameters) for tool in demand.tools),
        ),
        marks,
        parse=None,
    )
    events = [event for token in tokens for event in answer.push(token)] + answer.flush()
    out: list[Any] = []
    arguments = ""
    for event in events:
        match event:
            case ToolCallStart(name=name):
                out.append([name, None])
                arguments = ""
            case ToolCallArguments(text=text):
                arguments += text
            case ToolCallEnd():
                out[-1][1] = json.loads(arguments)
            case Text(text=text):
                out.append(text)
            case Reasoning():
                pass
    return out


FAMILIES = [name for name in TOOL_FAMILY_NAMES if forced_family(name) == name]


@pytest.mark.parametrize("markers", [{}, MARKERS], ids=["letters", "tokens"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tools", [TOOLS[:1], TOOLS, TOOLS[1:]], ids=["plain", "all", "rich"])
def test_every_forced_call_is_read_and_validates_against_its_schema(
    family: str, markers: dict[str, int], tools: tuple[Tool, ...]
) -> None:
    demand = forced(*tools, family=family, markers=markers)
    form, decision = form_of(demand)
    assert decision.family is not None
    schemas = {tool.name: tool.parameters for tool in tools}
    ended = 0
    for seed in range(6):
        tokens = walk(form, seed, soft_limit=100, hard_limit=900)
        if tokens is None:
            continue
        ended += 1
        calls = read_answer(tokens, decision.family, demand)
        assert calls
        for name, arguments in calls:
            jsonschema.Draft202012Validator(schemas[name]).validate(arguments)
    assert ended >= 3


@pytest.mark.parametrize("family", TOOL_FAMILY_NAMES)
def test_a_family_without_a_grammar_of_its_own_is_forced_in_json(family: str) -> None:
    _, decision = form_of(forced(*TOOLS, family=family))
    assert decision.family in (family, FALLBACK_FAMILY)
    assert forced_family(family) in (family, FALLBACK_FAMILY)
    assert forced_family(None) == FALLBACK_FAMILY


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
GOOD = '{"city": "Rome", "unit": "C"}'


def test_one_function_is_one_call_of_that_function() -> None:
    form, _ = form_of(forced(*TOOLS, choice=ToolChoice("one", "weather")))
    assert takes(form, CALL % ("weather", GOOD))
    assert not takes(form, CALL % ("weather", GOOD) + "\n" + CALL % ("weather", GOOD))
    assert not takes(form, CALL % ("now", "{}"))
    assert not takes(form, "It is sunny.")
    assert not takes(form, "")


def test_required_is_any_of_them_and_several_unless_parallel_is_off() -> None:
    several = CALL % ("weather", GOOD) + "\n" + CALL % ("now", "{}")
    form, _ = form_of(forced(*TOOLS))
    assert takes(form, several)
    assert takes(form, "\n".join([CALL % ("now", "{}")] * CALLS_HIGH))
    assert not takes(form, "\n".join([CALL % ("now", "{}")] * (CALLS_HIGH + 1)))
    single, _ = form_of(forced(*TOOLS, parallel=False))
    assert takes(single, CALL % ("now", "{}"))
    assert not takes(single, several)


def test_arguments_that_break_the_schema_are_refused() -> None:
    form, _ = form_of(forced(*TOOLS))
    assert not takes(form, CALL % ("weather", '{"city": "Rome", "unit": "K"}'))
    assert not takes(form, CALL % ("weather", '{"city": "Rome"}'))
    assert not takes(form, CALL % ("lookup", '{"code": "abc", "where": null}'))
    assert not takes(form, CALL % ("lookup", '{"code": "ab", "where": null, "more": 1}'))


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"a": {"enum": ["1"]}}},
        {
            "type": "object",
            "properties": {"a": {"type": "array", "items": {"type": "string", "maxLength": 2}}},
        },
        {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": True},
        EMPTY,
    ],
)
def test_arguments_that_xml_leaves_open_are_forced_in_json(parameters: dict[str, Any]) -> None:
    assert form_of(forced(tool("f", parameters), family="qwen3_coder"))[1].family == FALLBACK_FAMILY
    assert form_of(forced(tool("f", PLAIN), family="qwen3_coder"))[1].family == "qwen3_coder"


def test_a_marker_that_is_a_special_token_is_asked_for_as_that_token() -> None:
    demand = forced(*TOOLS, family="mistral", markers=MARKERS)
    form, _ = form_of(demand)
    assert takes(form, MARKERS["[TOOL_CALLS]"], "weather", MARKERS["[ARGS]"], GOOD)
    call = (MARKERS["[TOOL_CALLS]"], "weather", MARKERS["[ARGS]"], GOOD)
    assert takes(form, *call, *call)
    assert not takes(form, "[TOOL_CALLS]weather[ARGS]" + GOOD)
    # Elsewhere it is not allowed, whatever it spells.
    assert not takes(
        form, MARKERS["[TOOL_CALLS]"], "weather", MARKERS["[ARGS]"], '{"city": "', MARKERS["[ARGS]"]
    )


@pytest.mark.parametrize("markers", [{}, MARKERS], ids=["letters", "tokens"])
@pytest.mark.parametrize("reasoning", ["think", "gemma4", "mistral", "harmony", "kimi_k3"])
@pytest.mark.parametrize("starts_inside", [False, True])
def test_reasoning_may_come_before_a_forced_call(
    reasoning: str, starts_inside: bool, markers: dict[str, int]
) -> None:
    family = "harmony" if reasoning == "harmony" else "json_tools"
    block = reasoning_of(reasoning, starts_inside)
    demand = forced(*TOOLS, family=family, reasoning=block, markers=markers)
    form, decision = form_of(demand)
    assert decision.family == family
    assert block is not None
    for seed in range(4):
        tokens = walk(form, seed, soft_limit=80, hard_limit=900)
        if tokens is not None:
            calls = read_answer(tokens, family, demand, reasoning)
            assert [call for call in calls if isinstance(call, str) and call.strip()] == []
            assert any(not isinstance(call, str) for call in calls)


def test_a_strict_tool_whose_schema_is_not_enforced_is_refused_by_name() -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(ApiError) as caught:
        decide(forced(tool("now", EMPTY), tool("f", unique, strict=True)))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_schema")
    assert caught.value.param == "tools[1].function.parameters"
    assert "uniqueItems at /properties/a" in caught.value.message
    # The tool that is not asked for is nobody's business.
    other = forced(tool("now", EMPTY), tool("f", unique, strict=True), choice=ToolChoice("one", "now"))
    assert form_of(other)[1].warnings == ()


def test_a_tool_is_named_as_its_own_protocol_names_it() -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    named = Tool("f", unique, {}, strict=True, field="tools[4].input_schema")
    for refuse in (decide, lambda demand: give_up(demand, "it takes long")):
        with pytest.raises(ApiError) as caught:
            refuse(forced(named))
        assert caught.value.param == "tools[4].input_schema"
        assert "tools[4].input_schema" in caught.value.message


def test_another_tool_loses_the_keyword_and_the_answer_says_so() -> None:
    unique = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True}},
        "required": ["a"],
    }
    form, decision = form_of(forced(tool("f", unique)))
    assert decision.warnings == (
        "grammar not enforced: uniqueItems at /properties/a of tools[0].function.parameters",
    )
    assert takes(form, CALL % ("f", '{"a": [1, 1]}'))
    assert not takes(form, CALL % ("f", "{}"))


def test_a_schema_too_much_for_the_compiler_leaves_the_call_forced() -> None:
    demand = forced(*TOOLS, family="qwen3_coder")
    decision = give_up(demand, "it takes more than 10 s to compile")
    assert isinstance(decision, Enforced)
    assert decision.warnings == ("grammar not enforced: it takes more than 10 s to compile",)
    form = json.loads(decision.spec.text)["format"]
    assert takes(form, CALL % ("weather", '{"anything": [1]}'))
    assert not takes(form, "no call")
    with pytest.raises(ApiError) as caught:
        give_up(forced(tool("f", PLAIN, strict=True)), "it takes more than 10 s to compile")
    assert caught.value.code == "unsupported_schema"


def test_a_tool_schema_that_is_none_is_a_400_that_names_it() -> None:
    with pytest.raises(ApiError) as caught:
        decide(forced(tool("f", {"type": "object", "properties": {"a": {"type": "int"}}})))
    assert (caught.value.code, caught.value.param) == ("invalid_request", "tools[0].function.parameters")
    assert '"int"' in caught.value.message
