"""Typed readers for one field of a request body: the value, or an ApiError that says what would work.

JSON says `true` where Python would take 1, `1e999` where a number is meant, and nesting without an end;
each reader refuses what its field can't mean, naming the field and the value.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from typing import Any

import msgspec

from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import QUOTED_CHARS, cut


def invalid(param: str, message: str) -> ApiError:
    """400 invalid_request about `param`."""
    return error("invalid_request", message, param=param)


def quoted(value: object) -> str:
    """A value for an error message: as JSON, cut short."""
    try:
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError):
        text = type(value).__name__
    return cut(text)


def json_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; ApiError 400 when it is anything else."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError as err:
        raise error("invalid_request", "the body is nested too deeply to be a request") from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise error("invalid_request", f"the body is not valid JSON: {err}") from err
    if not isinstance(value, dict):
        raise error("invalid_request", f"the body must be a JSON object, not {quoted(value)}")
    return value


def unknown_field(name: str, known: Collection[str]) -> ApiError:
    """400 for a field nobody knows, with the nearest known one, or all of them, the nearest first.

    known: what may be sent; a field that would be refused too is no advice.
    """
    # Comparing takes memory for each character, and nothing near is longer than this.
    asked = name[:QUOTED_CHARS]
    nearest = difflib.get_close_matches(asked, known, n=1)
    if nearest:
        hint = f"did you mean {nearest[0]}?"
    else:
        matcher = difflib.SequenceMatcher(b=asked)

        def distance(field: str) -> tuple[float, str]:
            matcher.set_seq1(field)
            return -matcher.ratio(), field

        hint = f"known fields: {', '.join(sorted(known, key=distance))}"
    return error("unsupported_parameter", f"unknown field {quoted(name)}; {hint}", param=name)


def boolean(name: str, value: object, default: bool) -> bool:
    """true or false; null is `default`."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(name, f"{name} must be true or false, not {quoted(value)}")
    return value


def integer(name: str, value: object, low: int, high: int) -> int | None:
    """A whole number from low to high (a float without a fraction counts); null is None."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(name, f"{name} must be a whole number, not {quoted(value)}")
    if not low <= value <= high:
        bounds = f"{low} or more" if high >= 2**31 and value < low else f"from {low} to {high}"
        raise invalid(name, f"{name} must be {bounds}, not {quoted(value)}")
    return value


def number(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> float | None:
    """A finite number from low (itself excluded with above_low) to high; null is None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(name, f"{name} must be a number, not {quoted(value)}")
    fits = (low < value if above_low else low <= value) and value <= high
    if not fits or not math.isfinite(value):
        lower = f"more than {low:g} and at most" if above_low else f"from {low:g} to"
        raise invalid(name, f"{name} must be {lower} {high:g}, not {quoted(value)}")
    return float(value)
