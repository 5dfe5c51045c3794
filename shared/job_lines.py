"""What a job's process says on its stdout: one JSON line per message.

The same messages, with the time in front, are the events of the job that its log keeps and `/events` streams.
Lines that are none of these (a library's warning, a traceback) become `log` events, and the last of them are
what a crash is explained with.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """How far it is. name: one word, what is being done. progress: 0 to 1 over the whole job. message: for a
    person, without the name."""

    name: str
    progress: float
    message: str = ""


class Metric(msgspec.Struct, frozen=True, tag="metric"):
    """Figures that belong together: of one step, one evaluation. Their names are the kind's."""

    values: dict[str, float]


class Log(msgspec.Struct, frozen=True, tag="log"):
    """A line for whoever looks into the matter."""

    line: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The work is done and its result published."""

    result: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done. error: one line for a person, with what to do."""

    error: str


Line = Stage | Metric | Log | Done | Failed

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def read_line(line: bytes) -> Line | None:
    """The message in a line, None where it holds none."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
