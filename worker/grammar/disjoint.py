"""Whether no value can fit two of several schemas, so that oneOf asks for no more than anyOf. Pure.

Two proofs are tried, the ones that real schemas are written for: the schemas are of different types, or they
are objects that all require one property whose few values differ (a discriminated union).
"""

from __future__ import annotations

from collections.abc import Callable
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


def are_disjoint(schemas: list[Any], spend: Callable[[int], None]) -> bool:
    """Whether a value fits at most one of the schemas, as far as can be told; True is a proof.

    spend: told how many values and names are about to be looked at; may raise to stop that.
    """
    if not all(isinstance(schema, dict) for schema in schemas):
        return False
    if len({id(schema) for schema in schemas}) < len(schemas):
        # One that is referred to twice.
        return False
    types = [_types(schema, spend) for schema in schemas]
    if all(types) and sum(map(len, types)) == len(set().union(*types)):
        return True
    return any(_differ(schemas, name, spend) for name in _required_by_all(schemas, spend))


def _types(schema: dict[str, Any], spend: Callable[[int], None]) -> set[str]:
    """The types that a schema admits, number for integer too; empty where it doesn't say."""
    values = _values(schema)
    if values is not None:
        spend(len(values))
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


def _required_by_all(schemas: list[Any], spend: Callable[[int], None]) -> list[str]:
    """Names of properties that every schema requires and describes; only objects fit such a schema."""
    if not all(schema.get("type") == "object" for schema in schemas):
        return []
    listed = [schema.get("required") for schema in schemas]
    if not all(isinstance(names, list) for names in listed):
        return []
    spend(sum(len(names or ()) for names in listed))
    # What is no text in there is told of where that schema is read.
    first, *others = ([name for name in names or () if isinstance(name, str)] for names in listed)
    common = set(first).intersection(*others)
    return [name for name in dict.fromkeys(first) if name in common]


def _differ(schemas: list[Any], name: str, spend: Callable[[int], None]) -> bool:
    seen: set[bytes] = set()
    for schema in schemas:
        properties = schema.get("properties")
        values = _values(properties.get(name)) if isinstance(properties, dict) else None
        if values is None:
            return False
        spend(len(values))
        # As text: 1 and true are equal in Python, and lists have no hash.
        texts = {msgspec.json.encode(value) for value in values}
        if texts & seen:
            return False
        seen |= texts
    return True
