"""What a job's process says on its stdout: one JSON line per message.

Lines that are none of these (a library's warning, a traceback) are kept as the process's last words.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far it is. progress: 0 to 1 over the whole job. message: for a person, its first word the stage."""

    progress: float
    message: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The work is done and its result published."""

    result: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done. error: one line for a person, with what to do."""

    error: str


Line = Progress | Done | Failed

_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def read_line(line: bytes) -> Line | None:
    """The message in a line, None where it holds none."""
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
