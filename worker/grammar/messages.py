"""What the worker and its compiling process say to each other: msgpack messages, each behind its length."""

from __future__ import annotations

import msgspec

# Big-endian unsigned length before each message.
LENGTH_BYTES = 4

# A compiled grammar of a large vocabulary can be tens of megabytes; more than this is a fault.
FRAME_LIMIT_BYTES = 256 * 1024 * 1024


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """The first message: what each token adds to a text by id (b"" never allowed), the ids that end an
    answer, and the width of the logits, which may be more than there are tokens."""

    tokens: list[bytes]
    stop_ids: list[int]
    width: int


class Job(msgspec.Struct, frozen=True, tag=True):
    """Compile a structural tag."""

    number: int
    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The vocabulary is read: what takes time from here on is compiling."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The compiled grammar, serialised."""

    number: int
    grammar: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The compiler's own words."""

    number: int
    reason: str


ToCompiler = Vocabulary | Job
FromCompiler = Ready | Done | Failed


def frame(message: ToCompiler | FromCompiler) -> bytes:
    """A message as it is written."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
