"""A response's stream as bytes: its end, its numbers, its events; found by their beginnings and not read.

An event is `event: KIND`, a line `data: {"type":KIND,"sequence_number":N,…}` and a blank line; JSON has no
line breaks of its own, so a line that begins with `event: ` begins an event. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from mlxpool.shared.errors import STATUS_OF, ApiError

_TERMINAL = (
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: response.failed\n",
)
_ERROR = b"event: error\n"
_ENDS = (*_TERMINAL, _ERROR)
_DATA = b"\ndata: "
_NUMBERED = re.compile(rb'^(event: [^\n]*\ndata: \{"type":"[^"]*","sequence_number":)(\d+)', re.M)


class _Terminal(msgspec.Struct):
    response: msgspec.Raw


class _Blame(msgspec.Struct):
    message: str = ""
    code: str | None = None
    param: str | None = None


_terminal = msgspec.json.Decoder(_Terminal)
_blames = msgspec.json.Decoder(_Blame)


class Broken(NamedTuple):
    """Events that end with an error which is no end of a response. before: those that come before it."""

    before: bytes
    err: ApiError


def ends(data: bytes) -> bool:
    """Whether the last of these events ends the stream, however."""
    return data.startswith(_ENDS, last_event(data))


def final_response(data: bytes) -> bytes | None:
    """The response's object where the last of these events ends the stream, else None."""
    start = last_event(data)
    if not data.startswith(_TERMINAL, start):
        return None
    text = data[data.index(_DATA, start) + len(_DATA) :].rstrip(b"\n")
    return bytes(_terminal.decode(text).response)


def broken(data: bytes) -> Broken | None:
    """What these events end with where that is an error event, else None."""
    start = last_event(data)
    if not data.startswith(_ERROR, start):
        return None
    _, _, text = data[start:].partition(_DATA)
    try:
        blame = _blames.decode(text.rstrip(b"\n"))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        blame = _Blame()
    code = blame.code or "internal_error"
    message = blame.message or "the worker ended the stream with an error that it did not name"
    return Broken(data[:start], ApiError(STATUS_OF.get(code, 500), code, message, param=blame.param))


def events_of(data: bytes) -> Iterator[bytes]:
    """The JSON of each of these whole events."""
    for block in data.split(b"\n\n"):
        _, found, text = block.partition(_DATA)
        if found:
            yield text


def last_number(data: bytes) -> int:
    """The highest sequence_number among these events; -1 where there are none."""
    found = _NUMBERED.findall(data)
    return int(found[-1][1]) if found else -1


def renumbered(data: bytes, more: int) -> bytes:
    """These events with every sequence_number higher by `more`."""
    return _NUMBERED.sub(lambda found: found[1] + b"%d" % (int(found[2]) + more), data)


def after(data: bytes, number: int) -> bytes:
    """The events whose sequence_number is above `number`."""
    for match in _NUMBERED.finditer(data):
        if int(match[2]) > number:
            return data[match.start() :]
    return b""


def last_event(data: bytes) -> int:
    """Where the last of these whole events begins."""
    before = data.rfind(b"\n\nevent: ")
    return 0 if before < 0 else before + 2
