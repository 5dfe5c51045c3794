"""Reader of `stream_options`, which OpenAI's protocols share: how a stream is told."""

from __future__ import annotations

from typing import Any

from mlxpool.shared.api import read

_NAME = "stream_options"
# Padding against traffic analysis: nothing that a loopback answer needs.
_PADDING = "include_obfuscation"


def read_stream_options(value: object, stream: bool, *own: str) -> dict[str, Any]:
    """The options, {} for null. own: those that the protocol has beside padding. Raises ApiError 400."""
    if value is None:
        return {}
    like = f'{{"{own[0]}": true}}' if own else f'{{"{_PADDING}": false}}'
    given = read.mapping(_NAME, value, like)
    if not stream:
        raise read.invalid(_NAME, f"{_NAME} goes with stream: true only; leave it out")
    for name in given:
        if name not in (*own, _PADDING):
            err = read.unknown_field(name, own or (_PADDING,))
            raise read.unsupported(f"{_NAME}.{name}", f"{_NAME}: {err.message}")
    where = f"{_NAME}.{_PADDING}"
    if read.boolean(where, given.get(_PADDING), default=False):
        raise read.unsupported(where, f"{where} is not supported; leave it out")
    return given
