"""The three fields that the parent reads out of a request's body; the rest goes to the worker as it came.

One pass of msgspec over the bytes, which skips what it isn't asked for without building it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mlxpool.shared.api.read import bad_json, invalid, keep_alive, quoted
from mlxpool.shared.errors import error


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
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise bad_json(body, err) from None
    except RecursionError:
        raise error("invalid_request", "the body is nested too deeply") from None
    if raw.model is not None and not isinstance(raw.model, str):
        raise invalid("model", f"model is {quoted(raw.model)}; use a string")
    return Head(raw.model, raw.stream is True, keep_alive(raw.keep_alive))
