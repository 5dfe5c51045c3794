"""A response's stream as bytes: its end, its numbers, its events; found by their beginnings and not read.

An event is `event: KIND`, a line `data: {"type":KIND,"sequence_number":N,…}` and a blank line; JSON has no
line breaks of its own, so a line that begins with `event: ` begins an event. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

_TERMINAL = (
    b"event: response.completed\n",
    b"event: response.incomplete\n",
    b"event: response.failed\n",
)
_DATA = b"\ndata: "
_NUMBERED = re.compile(rb'^event: [^\n]*\ndata: \{"type":"[^"]*","sequence_number":(\d+)', re.M)


class _Terminal(msgspec.Struct):
    response: msgspec.Raw


_terminal = msgspec.json.Decoder(_Terminal)


def final_response(data: bytes) -> bytes | None:
    """The response's object where the last of these events ends the stream, else None."""
    start = data.rfind(b"\n\nevent: ") + 2
    if start == 1:
        start = 0
    if not data.startswith(_TERMINAL, start):
        return None
    text = data[data.index(_DATA, start) + len(_DATA) :].rstrip(b"\n")
    return bytes(_terminal.decode(text).response)


def events_of(data: bytes) -> Iterator[bytes]:
    """The JSON of each of these whole events."""
    for block in data.split(b"\n\n"):
        _, found, text = block.partition(_DATA)
        if found:
            yield text


def last_number(data: bytes) -> int:
    """The highest sequence_number among these events; -1 where there are none."""
    found = _NUMBERED.findall(data)
    return int(found[-1]) if found else -1


def after(data: bytes, number: int) -> bytes:
    """The events whose sequence_number is above `number`."""
    for match in _NUMBERED.finditer(data):
        if int(match[1]) > number:
            return data[match.start() :]
    return b""
