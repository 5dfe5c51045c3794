"""What the messages of several protocols are made of alike: content in parts, and a hosted cache's marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxpool.shared.api import read
from mlxpool.shared.errors import ApiError


def joined(where: str, value: object, part: Callable[[str, object], str]) -> str:
    """Text as it is; a list of parts as one string, with nothing between them. part: the text of the one at a
    place. Raises ApiError 400."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise read.invalid(
            where, f"{where} must be a string or a list of text parts, not {read.quoted(value)}"
        )
    return "".join(part(f"{where}[{place}]", entry) for place, entry in enumerate(value))


def no_such_part(where: str, kind: object) -> ApiError:
    """400 for a part that is no text."""
    return read.unsupported(
        f"{where}.type",
        f"{where}.type: a part of type {read.quoted(kind)} is not supported: "
        "this model reads text parts only",
    )


def check_cache_control(where: str, holder: Mapping[str, Any]) -> None:
    """Where a hosted cache would cut: taken, for prefixes are found by their tokens here. Raises ApiError
    400."""
    if holder.get("cache_control") is not None:
        cache_control(f"{where}.cache_control", holder["cache_control"])


def cache_control(name: str, value: object) -> object:
    """A check of an accepted field."""
    given = read.mapping(name, value, '{"type": "ephemeral"}')
    read.name_of(f"{name}.type", given.get("type"), ("ephemeral",))
    read.string(f"{name}.ttl", given.get("ttl"))
    return given
