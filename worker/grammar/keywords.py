"""The closed table of JSON-Schema keywords that the grammar compiler really enforces. Pure.

What isn't in it is not enforced, whatever the compiler makes of the word: it ignores most of what it doesn't
know, some with a warning on stderr. Each row was tried with text that breaks it (tests/unit/
test_grammar_keywords.py tries again), alone and together with its neighbours; where a keyword works only
without some neighbour, `schema` says so. Annotations assert nothing and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")

Family = Literal["string", "number", "array", "object"]

# Which of a value's types an assertion speaks about; the compiler needs that type said beside it.
FAMILY_OF: dict[str, Family] = {
    "minLength": "string",
    "maxLength": "string",
    "pattern": "string",
    "format": "string",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "properties": "object",
    "required": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "propertyNames": "object",
    "minProperties": "object",
    "maxProperties": "object",
}

# Of several, the compiler takes the first of these and looks at nothing beside it.
DECIDERS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")

# Formats that the compiler knows. Any other is an annotation, which is what the specification calls them all.
FORMATS = frozenset(
    (
        "date",
        "date-time",
        "time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    )
)

ANNOTATIONS = frozenset(
    (
        "$schema",
        "$id",
        "$comment",
        "$anchor",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "discriminator",
        "externalDocs",
        "nullable",
        "xml",
    )
)

# Words outside the table that say nothing with these values, so that they need no enforcing.
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "minContains": (0,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "additionalItems": (True, {}),
    "not": (False,),
}

# What the compiler's numbers hold exactly.
COUNT_HIGH = 2**31 - 1
INTEGER_HIGH = 2**63 - 1
NUMBER_HIGH = 2**53
MULTIPLE_HIGH = 1024


def is_annotation(keyword: str) -> bool:
    return keyword in ANNOTATIONS or keyword.startswith("x-")


def says_nothing(keyword: str, value: Any) -> bool:
    """Whether a keyword outside the table asserts nothing with this value."""
    return any(value is empty or value == empty for empty in _SAYS_NOTHING.get(keyword, ())) and not (
        # 0 and False are equal in Python.
        isinstance(value, bool) and keyword == "minContains"
    )


def is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    # A whole number may be larger than a float can tell.
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value) and value <= COUNT_HIGH


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if isinstance(name, str) and name in TYPES]
    return bool(names) and len(known) == len(names) == len(set(known))


def _is_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_schema(item) for item in value)


def _is_named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(is_schema(item) for item in value.values())


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_COUNT = (_is_count, f"a whole number from 0 to {COUNT_HIGH}")
_NUMBER = (is_number, "a number")
_SCHEMA = (is_schema, "a schema (an object, true or false)")
_SCHEMAS = (_is_schemas, "a list of one or more schemas")
_NAMED_SCHEMAS = (_is_named_schemas, "an object of schemas")
_STRING = (lambda value: isinstance(value, str), "a string")

# What each keyword's value must be for the schema to be one at all.
SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"one of {', '.join(TYPES)}, or a list of them"),
    "$ref": _STRING,
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of one or more values"),
    "anyOf": _SCHEMAS,
    "oneOf": _SCHEMAS,
    "allOf": _SCHEMAS,
    "not": _SCHEMA,
    "if": _SCHEMA,
    "then": _SCHEMA,
    "else": _SCHEMA,
    "contains": _SCHEMA,
    "minLength": _COUNT,
    "maxLength": _COUNT,
    "pattern": _STRING,
    "format": _STRING,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    # A list is what drafts before 2020-12 called prefixItems: valid, and not in the table.
    "items": (lambda value: is_schema(value) or _is_schemas(value), "a schema"),
    "prefixItems": _SCHEMAS,
    "minItems": _COUNT,
    "maxItems": _COUNT,
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
    "properties": _NAMED_SCHEMAS,
    "patternProperties": _NAMED_SCHEMAS,
    "$defs": _NAMED_SCHEMAS,
    "definitions": _NAMED_SCHEMAS,
    "required": (_is_strings, "a list of property names"),
    "additionalProperties": _SCHEMA,
    "propertyNames": _SCHEMA,
    "minProperties": _COUNT,
    "maxProperties": _COUNT,
}
