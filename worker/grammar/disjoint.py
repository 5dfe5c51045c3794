"""Whether no value can fit two of several schemas, so that oneOf asks for no more than anyOf. Pure.

Two proofs are tried, the ones that real schemas are written for: the schemas are of different types, or they
are objects that all require one property whose few values differ (a discriminated union).
"""

from __future__ import annotations

from typing import Any

import msgspec


def types_of_value(value: Any) -> set[str]:
    """The JSON types of a value; a whole number is of both number types."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def are_disjoint(schemas: list[Any]) -> bool:
    """Whether a value fits at most one of the schemas, as far as can be told; True is a proof."""
    if not all(isinstance(schema, dict) for schema in schemas):
        return False
    types = [_types(schema) for schema in schemas]
    if all(types) and sum(map(len, types)) == len(set().union(*types)):
        return True
    return any(_differ(schemas, name) for name in _required_by_all(schemas))


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema admits, number for integer too; empty where it doesn't say."""
    values = _values(schema)
    if values is not None:
        names = set().union(*(types_of_value(value) for value in values))
    else:
        given = schema.get("type", [])
        names = {given} if isinstance(given, str) else {name for name in given if isinstance(name, str)}
    return {"number" if name == "integer" else name for name in names}


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def _required_by_all(schemas: list[Any]) -> list[str]:
    """Names of properties that every schema requires and describes; only objects fit such a schema."""
    if not all(schema.get("type") == "object" for schema in schemas):
        return []
    listed = [schema.get("required") for schema in schemas]
    if not all(isinstance(names, list) for names in listed):
        return []
    first, *others = listed
    return [name for name in first or () if all(name in names for names in others if names is not None)]


def _differ(schemas: list[Any], name: str) -> bool:
    seen: set[bytes] = set()
    for schema in schemas:
        properties = schema.get("properties")
        values = _values(properties.get(name)) if isinstance(properties, dict) else None
        if values is None:
            return False
        # As text: 1 and true are equal in Python, and lists have no hash.
        texts = {msgspec.json.encode(value) for value in values}
        if texts & seen:
            return False
        seen |= texts
    return True
