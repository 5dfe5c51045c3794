"""An argument is brought to the type that its schema declares, and left alone where none is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.events import TextEvent, ToolCallArguments
from mlxpool.worker.text.format import AnswerFormat, DeclaredTool
from mlxpool.worker.text.tools.schema import coerce, from_text, texts_of, types_of

DEFINED = {
    "properties": {
        "plain": {"type": "integer"},
        "several": {"type": ["string", "null"]},
        "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "chosen": {"enum": ["a", 1, None]},
        "fixed": {"const": True},
        "named": {"$ref": "#/$defs/Item"},
        "endless": {"$ref": "#/properties/endless"},
        "wide": {"anyOf": [{"$ref": "#/properties/wide"}] * 1000},
        "open": {"anyOf": [{"type": "integer"}, {}]},
        "nothing": {"description": "?"},
        "odd": 5,
    },
    "$defs": {"Item": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("plain", ("integer",)),
        ("several", ("string", "null")),
        ("optional", ("integer", "null")),
        ("chosen", ("string", "integer", "null")),
        ("fixed", ("boolean",)),
        ("named", ("object",)),
        ("endless", ()),
        ("wide", ()),
        ("open", ()),
        ("nothing", ()),
        ("odd", ()),
        ("unknown", ()),
    ],
)
def test_types_are_found_wherever_a_schema_says_them(key: str, types: tuple[str, ...]) -> None:
    assert types_of(DEFINED, key) == types


@pytest.mark.parametrize(
    ("value", "types", "expected"),
    [
        ("5", ("integer",), 5),
        ("5.0", ("integer",), 5),
        ("5.5", ("integer",), "5.5"),
        (5, ("string",), "5"),
        (True, ("string",), "true"),
        ({"a": 1}, ("string",), '{"a": 1}'),
        ("true", ("boolean",), True),
        ("False", ("boolean",), False),
        ("yes", ("boolean",), "yes"),
        ("null", ("integer", "null"), None),
        ("null", ("string", "null"), "null"),
        ("7", ("string", "integer"), "7"),
        ("1.5", ("integer", "number"), 1.5),
        (3.0, ("integer",), 3),
        (3, ("number",), 3),
        ('{"a": [1]}', ("object",), {"a": [1]}),
        ("['a', 1]", ("array",), ["a", 1]),
        ("{1, 2}", ("array",), "{1, 2}"),
        ("NaN", ("number",), "NaN"),
        ("1e999", ("number",), "1e999"),
        ("anything", (), "anything"),
        (None, ("string",), "null"),
    ],
)
def test_a_value_becomes_what_was_declared(value: Any, types: tuple[str, ...], expected: Any) -> None:
    got = coerce(value, types)
    assert (got, type(got)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("null", ("string", "null"), None),
        ("5", ("string", "integer"), 5),
        ("five", ("integer", "string"), "five"),
        (" 5 ", ("integer",), 5),
        (" x ", ("string", "null"), " x "),
        ("(1, 2)", ("array",), [1, 2]),
    ],
)
def test_bare_text_is_the_first_type_that_fits_and_text_last(
    text: str, types: tuple[str, ...], expected: Any
) -> None:
    assert from_text(text, types) == expected


LISTED = {
    "properties": {"city": {"enum": ["Rome", " odd "]}, "one": {"const": "x"}, "any": {"type": "string"}}
}


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("Rome", "city", "Rome"),
        ("\n\n Rome\n\n\n", "city", "Rome"),
        (" odd ", "city", " odd "),
        (" Oslo ", "city", " Oslo "),
        (" x\n", "one", "x"),
        (" x\n", "any", " x\n"),
        (" x\n", "undeclared", " x\n"),
    ],
)
def test_blanks_around_a_listed_text_are_not_its_own(text: str, key: str, expected: str) -> None:
    assert from_text(text, types_of(LISTED, key), texts_of(LISTED, key)) == expected


def test_a_function_in_xml_gets_the_listed_text_in_any_chunking() -> None:
    opened = "<tool_call>\n<function=f>\n<parameter=city>"
    text = f"{opened}\n\n\n Rome\n\n\n</parameter>\n</function>\n</tool_call>"
    tool = DeclaredTool("f", {"type": "object", **LISTED})
    for size in (1, 3, len(text)):
        pieces = [text[at : at + size].encode() for at in range(0, len(text), size)]
        source = ByteDetokeniser(pieces.__getitem__)
        answer = AnswerText(source, AnswerFormat(tools="qwen3_coder", declared=(tool,)))
        events: list[TextEvent] = []
        for place in range(len(pieces)):
            events += answer.push(place)
        events += answer.flush()
        arguments = "".join(event.text for event in events if isinstance(event, ToolCallArguments))
        assert json.loads(arguments) == {"city": "Rome"}
