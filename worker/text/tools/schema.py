"""What type a declared argument has, and a value brought to it.

Models write `"5"` for an integer and `5` for a string; the schema says which was meant. Only an argument
itself is brought to its type, not what lies inside it. A schema that names no type leaves a value as it came.
Pure.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Schemas that are looked at for one type: references may go in circles, and alternatives into the thousands.
_SCHEMAS = 100

_TRUE, _FALSE, _NULL = ("true", "True"), ("false", "False"), ("null", "None", "Null")


def types_of(parameters: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The JSON types that the argument `key` may have, in the order the schema names them; () for any."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return tuple(dict.fromkeys(_types(schema, parameters, itertools.count())))


def texts_of(parameters: Mapping[str, Any], key: str) -> frozenset[str]:
    """The texts that the argument `key` is one of, where its schema lists them; empty for any."""
    properties = parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(schema, dict):
        return frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return frozenset()
    return frozenset(value for value in values if isinstance(value, str))


def _types(schema: object, root: Mapping[str, Any], looked_at: Iterator[int]) -> list[str]:
    if not isinstance(schema, dict) or next(looked_at) >= _SCHEMAS:
        return []
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, looked_at)
    named = schema.get("type")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [name for name in named if isinstance(name, str)]
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return [_type_name(value) for value in values]
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        if isinstance(branches, list):
            found = [_types(branch, root, looked_at) for branch in branches]
            # One branch that allows anything allows anything, where one of them is enough.
            if word != "allOf" and not all(found):
                return []
            return [name for names in found for name in names]
    return []


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    """A `#/…` reference into the same schema; None for any other."""
    if not reference.startswith("#/"):
        return None
    value: object = root
    for part in reference[2:].split("/"):
        if not isinstance(value, dict):
            return None
        value = value.get(part.replace("~1", "/").replace("~0", "~"))
    return value


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _fits(value: object, types: Sequence[str]) -> bool:
    name = _type_name(value)
    return name in types or (name == "integer" and "number" in types)


# Every type but string: what bare text is tried as where no type is declared.
ANY_BUT_TEXT = ("null", "boolean", "integer", "number", "object", "array")


def coerce(value: Any, types: Sequence[str]) -> Any:
    """`value` as the first of `types` that it can be read as; itself when it fits one, or none is known."""
    if not types or _fits(value, types):
        return value
    if isinstance(value, str):
        return from_text(value, types)
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    if "string" in types:
        return json.dumps(value, ensure_ascii=False)
    return value


def from_text(text: str, types: Sequence[str], texts: frozenset[str] = frozenset()) -> Any:
    """A value written as bare text, where anything can be a string: one of the listed texts without the
    blanks around it, else the first other type that fits."""
    bare = text.strip()
    if bare in texts and text not in texts:
        return bare
    if "null" in types and bare in _NULL:
        return None
    for name in types:
        value = _read(bare, name)
        if value is not None:
            return value
    return text


def _read(text: str, name: str) -> Any:
    """`text` as a value of one type; None where it is none."""
    if name == "boolean":
        return True if text in _TRUE else False if text in _FALSE else None
    if name in ("integer", "number", "object", "array"):
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            value = _literal(text) if name in ("object", "array") else None
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, float) and value.is_integer() and name == "integer":
            return int(value)
        return value if value is not None and _fits(value, (name,)) else None
    return None


def _literal(text: str) -> Any:
    """A container in Python's own notation, as models write them; None when it is none that JSON has too."""
    try:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _refuse(word: str) -> None:
    """NaN and the infinities are no JSON."""
    raise ValueError(word)
