"""Typed readers for one field of a request body: the value, or an ApiError that says what would work.

JSON says `true` where Python would take 1, `1e999` where a number is meant, and nesting without an end;
each reader refuses what its field can't mean, naming the field and the value. They know no protocol: what
the fields of one are called and mean is said elsewhere. Half of a surrogate pair never gets here: it is no
UTF-8, and the decoder refuses it wherever in a body it stands.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import QUOTED_CHARS, cut
from mlxpool.shared.units import parse_duration

# A body is decoded, rendered, compared and encoded again by recursive code: this leaves a hundred of Python's
# thousand frames to whoever does so. A schema takes two levels for each of its own.
NESTING_LIMIT_LEVELS = 900

# A high surrogate that no low one follows, or a low one: no text, though JSON can spell it.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


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
        raise _too_deep() from err
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise bad_json(body, err) from err
    if not isinstance(value, dict):
        raise error("invalid_request", f"the body must be a JSON object, not {quoted(value)}")
    if not is_shallow(value):
        raise _too_deep()
    return value


def bad_json(body: bytes, err: Exception) -> ApiError:
    """400 for a body that can't be decoded: no JSON, no object where `err` says so, or a number beyond all
    ranges. What clients get wrong most is a string cut in the middle of a character: then it says where."""
    if isinstance(err, msgspec.ValidationError):
        if "out of range" not in str(err):
            return error("invalid_request", "the body must be a JSON object")
        return error("invalid_request", f"the body holds too large a number: {err}; use one below 1e308")
    half = _LONE_SURROGATE.search(body)
    if half is None:
        return error("invalid_request", f"the body is not valid JSON: {err}")
    spelled = half.group().decode()
    return error(
        "invalid_request",
        f"the body is not valid JSON: {spelled} at byte {half.start()} is half of a character (a surrogate "
        f"without the other one); send both or leave it out",
    )


def _too_deep() -> ApiError:
    return error(
        "invalid_request",
        f"the body is nested too deeply to be a request; at most {NESTING_LIMIT_LEVELS} levels work",
    )


def is_shallow(value: object, levels: int = NESTING_LIMIT_LEVELS) -> bool:
    """Whether objects and lists nest in each other at most `levels` deep."""
    held = [value]
    for _ in range(levels):
        held = [
            inner
            for item in held
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list)
        ]
        if not held:
            return True
    return False


def unsupported(param: str, message: str) -> ApiError:
    """400 unsupported_parameter about `param`."""
    return error("unsupported_parameter", message, param=param)


_NO_ADVICE: Mapping[str, str] = {}


def unknown_field(name: str, known: Collection[str], advice: Mapping[str, str] = _NO_ADVICE) -> ApiError:
    """400 for a field nobody knows, with the nearest known one, or all of them, the nearest first.

    known: what may be sent; a field that would be refused too is no advice. advice: what to send instead of
    a name that others give to something known.
    """
    if name in advice:
        return unsupported(name, f"unknown field {quoted(name)}; send {advice[name]} instead")
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
    return unsupported(name, f"unknown field {quoted(name)}; {hint}")


def only(where: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse the first field of the object at `where` that is not among `known`."""
    for name in fields:
        if name not in known:
            err = unknown_field(name, known)
            raise unsupported(f"{where}.{name}", f"{where}: {err.message}")


def mapping(name: str, value: object, like: str = "") -> dict[str, Any]:
    """An object. like: how one looks, for the message."""
    if not isinstance(value, dict):
        example = f" like {like}" if like else ""
        raise invalid(name, f"{name} must be an object{example}, not {quoted(value)}")
    return value


def string(name: str, value: object) -> str | None:
    """Text; null is None."""
    if value is None or isinstance(value, str):
        return value
    raise invalid(name, f"{name} must be a string, not {quoted(value)}")


def text(name: str, value: object) -> str:
    """Text, which may be empty."""
    if isinstance(value, str):
        return value
    raise invalid(name, f"{name} must be a string, not {quoted(value)}")


def filled(name: str, value: object) -> str:
    """Text that is not empty."""
    if isinstance(value, str) and value:
        return value
    raise invalid(name, f"{name} must be a non-empty string, not {quoted(value)}")


def name_of(name: str, value: object, allowed: Sequence[str]) -> str:
    """One of the names in `allowed`."""
    if isinstance(value, str) and value in allowed:
        return value
    raise invalid(name, f"{name} must be one of {', '.join(allowed)}, not {quoted(value)}")


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


def keep_alive(value: object) -> float | None:
    """Seconds of `keep_alive`, also a duration like "5m"; negative keeps the model for ever, 0 lets it go at
    once, null is None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong_keep_alive(value)
    if isinstance(value, str) and value.strip().startswith("-"):
        try:
            parse_duration(value.strip()[1:])
        except ValueError:
            raise _wrong_keep_alive(value) from None
        return -1.0
    if not isinstance(value, str) and value < 0:
        return -1.0
    try:
        seconds = parse_duration(value)
    except (ValueError, OverflowError):
        raise _wrong_keep_alive(value) from None
    return seconds if math.isfinite(seconds) else -1.0


def _wrong_keep_alive(value: object) -> ApiError:
    return invalid(
        "keep_alive",
        f'keep_alive is {quoted(value)}; use seconds, a duration like "15m", 0, or -1 for ever',
    )
