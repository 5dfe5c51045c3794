"""The three fields that the parent reads out of a request's body; the rest goes to the worker as it came.

One pass of msgspec over the bytes, which skips what it isn't asked for without building it.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from mlxpool.shared.api.read import invalid, quoted
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.units import parse_duration


class _Head(msgspec.Struct):
    # Any: a wrong type must become our error, which names the field, not the decoder's.
    model: Any = None
    stream: Any = None
    keep_alive: Any = None


class Head(msgspec.Struct, frozen=True):
    """model: as asked for, None where absent. keep_alive_s: negative = never, None = not said."""

    model: str | None
    stream: bool
    keep_alive_s: float | None


_decoder = msgspec.json.Decoder(_Head)


def read_head(body: bytes) -> Head:
    """Raises ApiError 400 for what is no JSON object, or a field of the wrong type."""
    try:
        raw = _decoder.decode(body)
    except msgspec.ValidationError:
        raise error("invalid_request", "the body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise error("invalid_request", f"the body is not valid JSON: {err}") from None
    except RecursionError:
        raise error("invalid_request", "the body is nested too deeply") from None
    if raw.model is not None and not isinstance(raw.model, str):
        raise _wrong("model", raw.model, "a string")
    return Head(raw.model, raw.stream is True, _keep_alive(raw.keep_alive))


def _keep_alive(value: Any) -> float | None:
    """Seconds, or a duration like "5m"; negative keeps the model for ever, 0 lets it go at once."""
    if value is None:
        return None
    allowed = 'seconds, a duration like "15m", 0, or -1 for ever'
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _wrong("keep_alive", value, allowed)
    if isinstance(value, str) and value.strip().startswith("-"):
        negative = value.strip()[1:]
        try:
            parse_duration(negative)
        except ValueError:
            raise _wrong("keep_alive", value, allowed) from None
        return -1.0
    if not isinstance(value, str) and value < 0:
        return -1.0
    try:
        seconds = parse_duration(value)
    except (ValueError, OverflowError):
        raise _wrong("keep_alive", value, allowed) from None
    return seconds if math.isfinite(seconds) else -1.0


def _wrong(field: str, value: Any, allowed: str) -> ApiError:
    return invalid(field, f"{field} is {quoted(value)}; use {allowed}")
