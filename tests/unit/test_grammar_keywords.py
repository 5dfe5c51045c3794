"""Every row of the closed table: text that breaks the keyword is refused, text that obeys it is taken."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from mlxpool.worker.grammar import formats, keywords
from mlxpool.worker.grammar.schema import read
from tests.unit.grammar_world import schema_takes, takes

Case = tuple[Any, list[str], list[str]]

OBJECT = {"type": "object"}
CLOSED = {"type": "object", "additionalProperties": False}
INTEGER = {"type": "integer"}
A_INTEGER = {"properties": {"a": INTEGER}}

# Keyword: (schema, texts that obey it, texts that break it).
ENFORCED: dict[str, list[Case]] = {
    "type": [
        (INTEGER, ["1", "-5", "0"], ["1.5", '"a"', "true", "01", "null"]),
        ({"type": "number"}, ["1", "1.5", "-1e5"], ['"a"', "NaN", "+1"]),
        ({"type": "string"}, ['"a"', '""', '"\\u00e9\\n"', '"é"'], ["1", '"\n"', '"']),
        ({"type": "boolean"}, ["true", "false"], ["1", "True"]),
        ({"type": "null"}, ["null"], ["0", "nil"]),
        ({"type": "array"}, ["[]", "[1, [2]]"], ["{}", "[1,]"]),
        (OBJECT, ["{}", '{"a": 1}'], ["[]", "{a: 1}"]),
        ({"type": ["integer", "null"]}, ["1", "null"], ['"a"', "1.5"]),
        ({"type": ["integer", "string"], "minimum": 5, "minLength": 2}, ["7", '"ab"'], ["3", '"a"']),
        (True, ["1", "{}", '"x"'], ["x", ""]),
        ({}, ["1", "[{}]"], ["x", "1 1"]),
    ],
    "enum": [
        ({"enum": ["a", 1, None, True, {"x": 1}]}, ['"a"', "1", "null", "true", '{"x":1}'], ['"b"', "2"]),
        ({"type": "string", "enum": ["a", 1]}, ['"a"'], ["1", '"b"']),
        ({"enum": ["é", "😀", 'a"b\n']}, ['"é"', '"😀"', '"a\\"b\\n"'], ['"e"']),
        ({"enum": ["a", "b"], "const": "b"}, ['"b"'], ['"a"']),
    ],
    "const": [
        ({"const": "a"}, ['"a"'], ['"b"', "1"]),
        ({"const": None}, ["null"], ["1"]),
        ({"const": {"a": [1, 2]}}, ['{"a":[1,2]}'], ["{}", '{"a":[1]}']),
        ({"type": "string", "const": "a"}, ['"a"'], ['"b"']),
    ],
    "properties": [
        (
            {**OBJECT, **A_INTEGER},
            ['{"a": 1}', "{}", '{"a":1,"z":null}', '{"z":1}'],
            ['{"a":"x"}', '{"z":1,"a":"x"}'],
        ),
        (A_INTEGER, ['{"a": 1}', '{"z": 2}'], ['{"a": "x"}']),
        ({**CLOSED, "properties": {"a": True, "b": False}}, ['{"a": []}', "{}"], ['{"b": 1}']),
        ({**CLOSED, "properties": {'a"b\né': INTEGER}}, ['{"a\\"b\\né":1}'], ['{"b": 1}']),
        ({"properties": {"not": INTEGER, "if": {"type": "null"}}}, ['{"not":1,"if":null}'], ['{"not":"x"}']),
    ],
    "required": [
        ({**OBJECT, **A_INTEGER, "required": ["a"]}, ['{"a":1}', '{"a":1,"z":2}'], ["{}", '{"z":1}']),
        ({"required": ["a", "a"]}, ['{"a":1}', '{"a":[],"b":1}'], ["{}", '{"b":1}']),
        ({"required": ["a"], "additionalProperties": INTEGER}, ['{"a":1,"b":2}'], ['{"a":"x"}', '{"b":2}']),
    ],
    "additionalProperties": [
        ({**CLOSED, **A_INTEGER}, ["{}", '{"a":1}'], ['{"b":1}', '{"a":1,"b":1}']),
        (CLOSED, ["{}"], ['{"b":1}']),
        (
            {**A_INTEGER, "additionalProperties": {"type": "string"}},
            ['{"a":1,"b":"x"}', '{"b":"x"}'],
            ['{"b":1}', '{"a":"x"}'],
        ),
        ({"additionalProperties": INTEGER}, ["{}", '{"b":1}'], ['{"b":"x"}']),
    ],
    "patternProperties": [
        (
            {**CLOSED, "patternProperties": {"^x": INTEGER}},
            ["{}", '{"x":1,"x2":2}'],
            ['{"x":"a"}', '{"y":1}'],
        ),
        ({**CLOSED, "patternProperties": {"x": INTEGER}}, ['{"axb":1}'], ['{"axb":"a"}', '{"y":1}']),
    ],
    "propertyNames": [
        ({"propertyNames": {"pattern": "^[a-z]+$"}}, ['{"ab":1}', "{}"], ['{"A1":1}']),
        ({"propertyNames": {"enum": ["a", "b", 1]}}, ['{"a":1}'], ['{"c":1}', "{1:1}"]),
        ({"propertyNames": {"const": "a"}}, ['{"a":1}'], ['{"b":1}']),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab":1}'], ['{"a":1}', '{"abcd":1}']),
        (
            {"propertyNames": {"pattern": "^x"}, "additionalProperties": INTEGER},
            ['{"xy":1}'],
            ['{"xy":"a"}', '{"a":1}'],
        ),
    ],
    "minProperties": [
        ({**CLOSED, "properties": {"a": {}, "b": {}}, "minProperties": 1}, ['{"a":1}', '{"b":1}'], ["{}"]),
        ({"required": ["a"], "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ],
    "maxProperties": [
        ({"maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
        ({**A_INTEGER, "maxProperties": 1}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":2}']),
        ({"propertyNames": {"pattern": "^x"}, "maxProperties": 1}, ['{"x":1}'], ['{"x":1,"xx":2}']),
        ({**CLOSED, "patternProperties": {"^x": {}}, "maxProperties": 1}, ['{"x":1}'], ['{"x":1,"xx":2}']),
    ],
    "items": [
        ({"items": INTEGER}, ["[]", "[1, 2]"], ['["a"]', '[1,"a"]']),
        ({"items": False}, ["[]"], ["[1]"]),
        ({"prefixItems": [INTEGER], "items": {"type": "string"}}, ['[1,"a","b"]', "[1]"], ["[1,1]"]),
        ({"prefixItems": [INTEGER], "items": False}, ["[1]"], ["[1,1]"]),
    ],
    "prefixItems": [
        (
            {"prefixItems": [INTEGER, {"type": "string"}]},
            ['[1,"a"]', '[1,"a",null]', "[1]"],
            ['["a"]', "[1,1]"],
        ),
        ({"prefixItems": [INTEGER, INTEGER], "maxItems": 1}, ["[1]", "[]"], ["[1,1]", '["a"]']),
        ({"prefixItems": [INTEGER], "minItems": 2}, ["[1,null]"], ["[1]", "[]"]),
    ],
    "minItems": [
        ({"minItems": 2}, ["[1,2]", "[1,2,3]"], ["[]", "[1]"]),
        ({"minItems": 1.0}, ["[1]"], ["[]"]),
    ],
    "maxItems": [
        ({"items": INTEGER, "maxItems": 2}, ["[]", "[1,2]"], ["[1,2,3]"]),
        ({"maxItems": 0}, ["[]"], ["[1]"]),
    ],
    "minLength": [({"minLength": 2}, ['"ab"', '"éé"'], ['"a"', '"é"', '"\\n"', '"\\u00e9"'])],
    "maxLength": [({"type": "string", "maxLength": 2}, ['""', '"éé"'], ['"abc"'])],
    "pattern": [
        ({"pattern": "^[a-z]+$"}, ['"ab"'], ['"A"', '""']),
        ({"pattern": "[0-9]"}, ['"a1b"', '"1"'], ['"ab"', '""']),
        ({"pattern": "^a|b$"}, ['"axx"', '"xxb"'], ['"xax"']),
        ({"pattern": "^[^a]$"}, ['"b"', '"é"'], ['"a"', '"""', '"\\"']),
        ({"pattern": '^[^\\n"]+$'}, ['"a b"'], ['"""', '"\n"', '"a"b"']),
        ({"pattern": "^\\d{3}-\\w\\s\\.$"}, ['"123-a ."'], ['"12-a ."', '"123-a x"', '"123-a\n."']),
        ({"pattern": "^[!-~]+$"}, ['"a#"'], ['"a"b"', '"a\\"']),
        ({"pattern": "^(?:ab|c){2,3}?$"}, ['"abc"', '"ccc"'], ['"c"', '"cccc"']),
        ({"pattern": "^\\D\\W\\S$"}, ['"a-b"'], ['"""""', '"a-\\"', '"1-b"']),
    ],
    "format": [
        ({"format": "date"}, ['"2024-01-31"'], ['"x"', '"2024-13-01"']),
        ({"format": "date-time"}, ['"2024-01-31T10:00:00Z"'], ['"2024-01-31"']),
        ({"format": "time"}, ['"10:00:00Z"'], ['"x"']),
        ({"format": "duration"}, ['"P1D"'], ['"1 day"']),
        ({"format": "email"}, ['"a@b.co"'], ['"x"']),
        ({"format": "hostname"}, ['"a.b"'], ['"-"']),
        ({"format": "ipv4"}, ['"1.2.3.4"'], ['"1.2.3.256"']),
        ({"format": "ipv6"}, ['"::1"'], ['"x"']),
        ({"format": "json-pointer"}, ['"/a/b"'], ['"x"']),
        ({"format": "relative-json-pointer"}, ['"0/a"'], ['"x"']),
        ({"format": "uri"}, ['"http://a.b/c?d=e"'], ['"x x"']),
        ({"format": "uri-reference"}, ['"/a"'], ['"a b"']),
        ({"format": "uri-template"}, ['"a{b}"'], ['"{"']),
        ({"format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"x"']),
    ],
    "minimum": [
        ({**INTEGER, "minimum": 5}, ["5", "100"], ["4", "-1", "-100"]),
        ({**INTEGER, "minimum": 4.5}, ["5"], ["4"]),
        ({"minimum": 0.5, "maximum": 2}, ["0.5", "1.75", "2"], ["0.4", "2.1", "3"]),
        ({"minimum": 5}, ["6", "5.5"], ["4", "4.9", "5e-1"]),
    ],
    "maximum": [
        ({**INTEGER, "maximum": -5}, ["-5", "-17"], ["-4", "0", "3"]),
        ({"maximum": -1.25, "minimum": -2.5}, ["-2.5", "-1.3"], ["-1.2", "-2.6", "0", "-25"]),
    ],
    "exclusiveMinimum": [
        ({**INTEGER, "exclusiveMinimum": 5}, ["6"], ["5"]),
        ({**INTEGER, "exclusiveMinimum": 4.5}, ["5"], ["4"]),
        ({**INTEGER, "minimum": 9, "exclusiveMinimum": 4.5}, ["9"], ["5", "8"]),
        ({"exclusiveMinimum": 0}, ["0.1", "1"], ["0", "0.0", "-1"]),
    ],
    "exclusiveMaximum": [
        ({**INTEGER, "exclusiveMaximum": 5}, ["4"], ["5"]),
        ({"exclusiveMaximum": 1, "exclusiveMinimum": 0}, ["0.99"], ["1", "1.0", "1.5", "0"]),
    ],
    "multipleOf": [
        ({**INTEGER, "multipleOf": 5}, ["10", "0", "-15"], ["7"]),
        ({**INTEGER, "multipleOf": 7.0}, ["49", "-14"], ["48"]),
        ({"type": ["integer", "null"], "multipleOf": 1000}, ["3000", "null"], ["999"]),
    ],
    "anyOf": [
        ({"anyOf": [INTEGER, {"type": "string", "maxLength": 1}]}, ["1", '"a"'], ["null", '"ab"']),
        ({**INTEGER, "anyOf": [{"minimum": 5}, {"maximum": 0}]}, ["6", "-1"], ['"a"', "3"]),
        ({**OBJECT, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, ['{"a":1}', '{"b":1}'], ["{}"]),
        ({"anyOf": [False, INTEGER]}, ["1"], ['"a"']),
    ],
    "oneOf": [
        ({"oneOf": [INTEGER, {"type": "string"}]}, ["1", '"a"'], ["null"]),
        (
            {
                "oneOf": [
                    {**CLOSED, "properties": {"k": {"const": "a"}, "v": INTEGER}, "required": ["k", "v"]},
                    {**CLOSED, "properties": {"k": {"enum": ["b"]}}, "required": ["k"]},
                ],
                "discriminator": {"propertyName": "k"},
            },
            ['{"k":"a","v":1}', '{"k":"b"}'],
            ['{"k":"a"}', '{"k":"b","v":1}', '{"k":"c"}'],
        ),
    ],
    "allOf": [({"allOf": [INTEGER], "title": "t", "default": 1}, ["1"], ['"a"'])],
    "$ref": [
        ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}}, ["1"], ['"a"']),
        ({"$ref": "#/definitions/a~1b%20c", "definitions": {"a/b c": INTEGER}}, ["1"], ['"a"']),
        ({**CLOSED, "properties": {"c": {"$ref": "#"}}}, ['{"c":{"c":{}}}'], ['{"c":1}', '{"c":{"c":1}}']),
        ({"prefixItems": [INTEGER, {"$ref": "#/prefixItems/0"}]}, ["[1,2]"], ['[1,"a"]']),
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {
                    "n": {
                        **CLOSED,
                        "properties": {"v": INTEGER, "n": {"$ref": "#/$defs/n"}},
                        "required": ["v"],
                    }
                },
            },
            ['{"v":1,"n":{"v":2}}'],
            ['{"v":1,"n":{}}', '{"v":1,"n":{"v":"x"}}'],
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/x", "description": "d"}}, "$defs": {"x": INTEGER}},
            ['{"a":1}'],
            ['{"a":"x"}'],
        ),
    ],
}

CASES = [
    pytest.param(*case, id=f"{keyword}-{place}")
    for keyword, cases in ENFORCED.items()
    for place, case in enumerate(cases)
]


@pytest.mark.parametrize(("schema", "obeying", "breaking"), CASES)
def test_text_that_breaks_a_keyword_of_the_table_is_refused(
    schema: Any, obeying: list[str], breaking: list[str]
) -> None:
    assert [text for text in obeying if not schema_takes(schema, text)] == []
    assert [text for text in breaking if schema_takes(schema, text)] == []


def test_every_keyword_of_the_table_is_tried() -> None:
    table = {*keywords.FAMILY_OF, *keywords.DECIDERS, "type"}
    assert table == ENFORCED.keys()
    tried = {schema.get("format") for schema, _, _ in ENFORCED["format"]}
    assert tried == keywords.FORMATS


@pytest.mark.parametrize(("schema", "obeying", "breaking"), CASES)
def test_the_cases_agree_with_jsonschema(schema: Any, obeying: list[str], breaking: list[str]) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for text in obeying:
        validator.validate(json.loads(text))


# (schema, what is reported, a text that breaks the schema and that the compiler would take).
UNENFORCED: list[tuple[Any, list[tuple[str, str]], str]] = [
    ({"type": "array", "uniqueItems": True}, [("", "uniqueItems")], "[1,1]"),
    ({"not": INTEGER}, [("", "not")], "1"),
    ({"if": INTEGER, "then": {"minimum": 5}}, [("", "if"), ("", "then")], "1"),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, [("", "dependentRequired")], '{"a":1}'),
    ({**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}, [("", "dependentSchemas")], '{"a":1}'),
    ({**OBJECT, **A_INTEGER, "unevaluatedProperties": False}, [("", "unevaluatedProperties")], '{"b":1}'),
    ({"oneOf": [INTEGER, {"type": "number"}]}, [("", "oneOf")], "1"),
    ({"allOf": [INTEGER, {"minimum": 5}]}, [("", "allOf")], "3"),
    ({"minimum": 5, "allOf": [INTEGER]}, [("", "minimum")], "3"),
    ({"type": "array", "contains": INTEGER}, [("", "contains")], '["a"]'),
    ({"type": "string", "minLenght": 2}, [("", "minLenght")], '"a"'),
    ({"pattern": "^[a-z]+$", "maxLength": 2}, [("", "maxLength")], '"abc"'),
    ({"format": "date", "maxLength": 3}, [("", "format")], '"abc"'),
    ({"format": "date", "pattern": "^a$"}, [("", "format")], '"a"'),
    ({"pattern": "^(?=a)b$"}, [("", "pattern")], '"b"'),
    ({"pattern": '^"$'}, [("", "pattern")], '"\\""'),
    ({"type": "number", "multipleOf": 0.1}, [("", "multipleOf")], "0.15"),
    ({**INTEGER, "multipleOf": 5, "minimum": 10}, [("", "multipleOf")], "12"),
    ({**INTEGER, "multipleOf": 100000}, [("", "multipleOf")], "3"),
    ({**OBJECT, "minProperties": 2}, [("", "minProperties")], '{"a":1,"a":2}'),
    ({**OBJECT, "patternProperties": {"^x": INTEGER}}, [("", "patternProperties")], '{"x":"a"}'),
    ({**A_INTEGER, "propertyNames": {"maxLength": 2}}, [("", "propertyNames")], '{"abc":1}'),
    ({**CLOSED, "required": ["a"]}, [("", "required")], "{}"),
    ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": INTEGER}}, [("", "minimum")], "3"),
    ({"$ref": "http://elsewhere/x"}, [("", "$ref")], "3"),
    ({"enum": [1, 9], "minimum": 5}, [("", "minimum")], "1"),
    ({"const": "abc", "maxLength": 1}, [("", "maxLength")], '"abc"'),
    ({**A_INTEGER, "anyOf": [{"required": ["a"]}]}, [("", "anyOf")], "{}"),
    ({"items": [INTEGER]}, [("", "items")], '["a"]'),
    ({**INTEGER, "minimum": 2**70}, [("", "minimum")], "1"),
    ({"properties": {"a": {"items": {"not": {}}}}}, [("/properties/a/items", "not")], '{"a":[1]}'),
    ({"$ref": "#/$defs/a~b", "$defs": {"a~b": {"not": {}}}}, [("/$defs/a~b", "not")], "1"),
    ({"properties": {"a/b": {"uniqueItems": True}}}, [("/properties/a~1b", "uniqueItems")], '{"a/b":[1,1]}'),
]


@pytest.mark.parametrize(("schema", "found", "text"), UNENFORCED)
def test_a_keyword_that_would_not_be_enforced_is_reported_and_left_out(
    schema: Any, found: list[tuple[str, str]], text: str
) -> None:
    assert [(finding.pointer, finding.keyword) for finding in read(schema).unenforced] == found
    # The grammar is wider than the schema: that is why it has to be reported.
    assert takes(formats.json_schema(read(schema).schema), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"title": "T", "description": "d", "default": 1, "examples": [1], "$comment": "c", "type": "integer"},
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "https://x/y",
            "x-note": {"not": 1},
        },
        {"type": "array", "uniqueItems": False},
        {"type": "integer", "format": "int32", "deprecated": True, "readOnly": True},
        {"$defs": {"unused": {"not": {}}}, "type": "integer"},
        {"properties": {"uniqueItems": {"type": "boolean"}, "oneOf": {"type": "null"}}},
        {"enum": [{"not": 1}, {"if": 2}]},
        {"then": {"not": {}}},
    ],
)
def test_annotations_and_names_are_no_keywords(schema: Any) -> None:
    assert read(schema).unenforced == ()
