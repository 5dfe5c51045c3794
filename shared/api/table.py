"""A protocol's closed table of fields: each is honoured, accepted without effect, or refused.

The table is what the validator checks a body against and what docs/fields.md is made from, so neither can
say what the other doesn't. Nothing is dropped silently: an unknown field is a 400 that names the nearest
known one, a refused field a 400 `unsupported_parameter`, unless its value is one that means "off", which
clients send all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from mlxpool.shared.api import read


class Field(msgspec.Struct, frozen=True):
    """One row. values, default: for the documents. why: what it means, or for an accepted one why it can't
    change the text, or for a refused one what is missing. check: reads an accepted one's value and raises
    ApiError. off: values besides null with which a refused one asks for nothing. instead: what works in its
    place. schema: JSON schema of its values for the server's OpenAPI document, null apart; None for any."""

    status: Literal["honoured", "accepted", "refused"]
    why: str
    values: str = ""
    default: str = "unset"
    check: Callable[[str, object], object] | None = None
    off: tuple[object, ...] = ()
    instead: str = ""
    schema: dict[str, Any] | None = None


def honoured(values: str, why: str, default: str = "unset", schema: dict[str, Any] | None = None) -> Field:
    return Field("honoured", why, values, default, schema=schema)


def accepted(
    values: str,
    why: str,
    check: Callable[[str, object], object],
    schema: dict[str, Any] | None = None,
) -> Field:
    return Field("accepted", why, values, check=check, schema=schema)


def refused(why: str, *off: object, instead: str = "") -> Field:
    values = ", ".join(read.quoted(value) for value in (None, *off))
    return Field("refused", why, values, off=off, instead=instead, schema={"enum": [None, *off]})


def an_object(name: str, value: object) -> object:
    """A check of an accepted field."""
    return read.mapping(name, value)


def a_boolean(name: str, value: object) -> object:
    """A check of an accepted field."""
    return read.boolean(name, value, default=False)


def is_off(value: object, off: tuple[object, ...]) -> bool:
    """Whether it is null or one of `off`; false and 0 are told apart, 0 and 0.0 are not."""
    return value is None or any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in off
    )


def check(table: Mapping[str, Field], fields: Mapping[str, Any], advice: Mapping[str, str]) -> None:
    """Raise ApiError 400 for the first field that is unknown or asks for what is refused.

    advice: what to send instead of names that other servers use.
    """
    for name, value in fields.items():
        row = table.get(name)
        if row is None:
            known = [other for other, its in table.items() if its.status != "refused"]
            raise read.unknown_field(name, known, advice)
        if row.status == "refused" and not is_off(value, row.off):
            what = row.instead or f"leave {name} out"
            raise read.unsupported(name, f"{name}: {read.quoted(value)} is not supported: {row.why}; {what}")
        if row.check is not None and value is not None:
            row.check(name, value)
