"""A configuration's shape as JSON schema, and its parts in words. Pure.

One schema makes a kind's form, its command's flags, its table in the documents and what a refusal says would
work, so none of them can say something else than the struct that is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import msgspec

_REFS = "#/$defs/"
_TYPE_NAMES = {bool: "boolean", int: "integer", str: "string", float: "number"}
_WORDS = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
}


@functools.cache
def shape_of(config: type[msgspec.Struct]) -> dict[str, Any]:
    """Its JSON schema without references. Each of `properties` has `type` and, where there are such,
    `description`, `default`, `enum`, bounds, `x-source`; one that may be null has `nullable`, and then null
    is in neither. Not to be changed."""
    (made,), defs = msgspec.json.schema_components([config], ref_template=_REFS + "{name}")
    shape: dict[str, Any] = _inline(made, defs)
    shape["properties"] = {name: _flat(value) for name, value in shape.get("properties", {}).items()}
    return shape


def describe(values: Mapping[str, Any]) -> str:
    """What a property may be, in words: "a whole number from 1 to 8"."""
    if "anyOf" in values:
        told = " or ".join(describe(one) for one in values["anyOf"])
    elif "enum" in values:
        told = f"one of {', '.join(str(value) for value in values['enum'])}"
    else:
        told = _WORDS.get(values.get("type", ""), "a value") + _bounds(values)
    return f"{told}, or null" if values.get("nullable") else told


def _bounds(values: Mapping[str, Any]) -> str:
    """Bounds of a number, or of the length of a text or list."""
    low, high = values.get("minimum"), values.get("maximum")
    above, below = values.get("exclusiveMinimum"), values.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    said = [
        f"{word} {bound}"
        for word, bound in (("at least", low), ("above", above), ("at most", high), ("below", below))
        if bound is not None
    ]
    numbers = f", {' and '.join(said)}" if said else ""
    shortest = max(values.get("minLength", 0), values.get("minItems", 0))
    longest = min(values.get("maxLength", math.inf), values.get("maxItems", math.inf))
    of = "characters" if values.get("type") == "string" else "entries"
    length = ""
    if longest < math.inf:
        length = f" of {shortest} to {longest} {of}"
    elif shortest:
        length = f" of at least {shortest} {of}"
    pattern = f" that matches {values['pattern']}" if "pattern" in values else ""
    return numbers + length + pattern


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """A property that may be null as the property that it is otherwise."""
    inner = values.get("anyOf", [])
    others = [one for one in inner if one.get("type") != "null"]
    if inner:
        rest = {key: value for key, value in values.items() if key != "anyOf"}
        alone = others[0] if len(others) == 1 else {"anyOf": others}
        values = {**alone, **rest}
        if len(others) < len(inner):
            values["nullable"] = True
    if "enum" in values:
        choices = [value for value in values["enum"] if value is not None]
        if len(choices) < len(values["enum"]):
            values["nullable"] = True
        values["enum"] = choices
        values.setdefault("type", _TYPE_NAMES.get(type(choices[0]), "string"))
    return values


def _inline(value: Any, defs: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            named = _inline(defs[value["$ref"].removeprefix(_REFS)], defs)
            return {**named, **{key: part for key, part in value.items() if key != "$ref"}}
        return {key: _inline(part, defs) for key, part in value.items()}
    return [_inline(part, defs) for part in value] if isinstance(value, list) else value
