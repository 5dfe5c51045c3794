"""What form an answer must have, in whichever field it was asked for.

Several fields ask for a form, and clients send more than one: the first in this order wins, and all are
checked: guided_grammar, a JSON schema in response_format, its json_object, structured_outputs, guided_json,
guided_regex, guided_choice. A schema is read wherever clients put it. Whether a grammar or a schema can be
compiled is found out later; here it only has the right type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mlxpool.shared.api import read
from mlxpool.shared.errors import ApiError

# A list this long compiles in well under the limit of a grammar's time.
CHOICES_LIMIT = 1024

_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
# vLLM's own dials: values that ask for nothing.
_DIALS_OFF: tuple[object, ...] = (None, False)
_DIALS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


class Structure(msgspec.Struct, frozen=True):
    """The form that won by precedence. value: the schema (object or bool) of json_schema, the pattern of
    regex, the text of grammar (EBNF), the strings of choice, None for json_object. strict: whether the
    request insists. field: where it was asked for, for messages."""

    kind: Literal["grammar", "json_schema", "json_object", "regex", "choice"]
    field: str
    value: Any = None
    strict: bool = False


def read_structure(fields: Mapping[str, Any], own: Structure | None = None) -> Structure | None:
    """The form that a body asks for, None for plain text. own: what the protocol asks for in a place of its
    own, which ranks as response_format does. Raises ApiError 400, for the losers too."""
    by_rank = (
        _grammar("guided_grammar", fields.get("guided_grammar")),
        own or read_format("response_format", fields.get("response_format")),
        _structured_outputs("structured_outputs", fields.get("structured_outputs")),
        _json("guided_json", fields.get("guided_json")),
        _regex("guided_regex", fields.get("guided_regex")),
        _choice("guided_choice", fields.get("guided_choice")),
    )
    return next((structure for structure in by_rank if structure is not None), None)


def _grammar(name: str, value: object) -> Structure | None:
    if value is None:
        return None
    return Structure("grammar", name, read.filled(name, value))


def _regex(name: str, value: object) -> Structure | None:
    if value is None:
        return None
    return Structure("regex", name, read.filled(name, value))


def _choice(name: str, value: object) -> Structure | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise read.invalid(name, f"{name} must be a non-empty list of strings, not {read.quoted(value)}")
    if len(value) > CHOICES_LIMIT:
        raise read.invalid(name, f"{name} holds {len(value)} strings; at most {CHOICES_LIMIT} work")
    choices = tuple(read.filled(f"{name}[{place}]", choice) for place, choice in enumerate(value))
    if len(set(choices)) < len(choices):
        twice = next(choice for place, choice in enumerate(choices) if choice in choices[:place])
        raise read.invalid(name, f"{name} holds {read.quoted(twice)} twice; each string may be there once")
    return Structure("choice", name, choices)


def _json(name: str, value: object) -> Structure | None:
    """A schema, also as JSON text."""
    if value is None:
        return None
    schema = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise _no_schema(name, value) from None
        if not read.is_shallow(schema):
            raise read.invalid(
                name, f"{name} is nested too deeply; at most {read.NESTING_LIMIT_LEVELS} levels work"
            )
    return Structure("json_schema", name, read_schema(name, schema))


def read_schema(name: str, value: object) -> dict[str, Any] | bool:
    """A JSON schema. Raises ApiError 400."""
    if isinstance(value, dict | bool):
        return value
    raise _no_schema(name, value)


def _no_schema(name: str, value: object) -> ApiError:
    return read.invalid(
        name, f'{name} must be a JSON schema like {{"type": "object"}}, not {read.quoted(value)}'
    )


def _structured_outputs(name: str, value: object) -> Structure | None:
    if value is None:
        return None
    given = read.mapping(name, value, '{"json": {"type": "object"}}')
    for dial in _DIALS:
        if not any(given.get(dial) is off for off in _DIALS_OFF):
            raise read.unsupported(f"{name}.{dial}", f"{name}.{dial} is not supported; leave it out")
    read.only(name, given, (*_FORMS, *_DIALS))
    asked = [form for form in _FORMS if given.get(form) is not None]
    if len(asked) != 1:
        held = f"holds {' and '.join(asked)}" if asked else "holds none of them"
        raise read.invalid(name, f"{name} must hold one of {', '.join(_FORMS)}; it {held}")
    form = asked[0]
    where = f"{name}.{form}"
    if form == "json_object":
        if given[form] is not True:
            raise read.invalid(where, f"{where} must be true, not {read.quoted(given[form])}")
        return Structure("json_object", name)
    reader = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}[form]
    structure = reader(where, given[form])
    return None if structure is None else msgspec.structs.replace(structure, field=name)


def read_format(name: str, value: object) -> Structure | None:
    """OpenAI's three forms. The schema may also lie beside the type, where other servers read it; with it
    there, json_object means that schema. None for plain text. Raises ApiError 400."""
    if value is None:
        return None
    given = read.mapping(name, value, '{"type": "json_object"}')
    kind = given.get("type")
    if isinstance(kind, str) and kind in ("grammar", "regex"):
        raise read.unsupported(
            f"{name}.type", f"{name}.type {read.quoted(kind)} is not supported; send guided_{kind} instead"
        )
    kind = read.name_of(f"{name}.type", kind, _FORMATS)
    if kind == "text":
        read.only(name, given, ("type",))
        return None
    if kind == "json_object":
        read.only(name, given, ("type", "schema"))
        if given.get("schema") is None:
            return Structure("json_object", name)
        return Structure("json_schema", name, read_schema(f"{name}.schema", given["schema"]))
    return _json_schema(name, given)


def _json_schema(name: str, given: Mapping[str, Any]) -> Structure:
    inner = given.get("json_schema")
    if inner is not None and given.get("schema") is not None:
        raise read.invalid(
            f"{name}.schema", f"{name} holds a schema in json_schema and another in schema; send one of them"
        )
    where = name
    holder = given
    if inner is not None:
        where = f"{name}.json_schema"
        holder = read.mapping(where, inner, '{"name": "answer", "schema": {"type": "object"}}')
    if holder.get("schema") is None:
        place = f"{name}.json_schema.schema"
        raise read.invalid(place, f'{place} is missing; it must be a JSON schema like {{"type": "object"}}')
    if inner is not None:
        read.only(name, given, ("type", "json_schema", "schema"))
        read.only(where, holder, _SCHEMA_FIELDS)
    else:
        read.only(name, given, ("type", "json_schema", *_SCHEMA_FIELDS))
    for label in ("name", "description"):
        read.string(f"{where}.{label}", holder.get(label))
    return Structure(
        "json_schema",
        name,
        read_schema(f"{where}.schema", holder["schema"]),
        read.boolean(f"{where}.strict", holder.get("strict"), default=False),
    )
