"""What the worker and its compiling process say to each other: msgpack messages, each behind its length."""

from __future__ import annotations

import msgspec

# Big-endian unsigned length before each message.
LENGTH_BYTES = 4

# The worker holds it twice while it reads a grammar back.
FRAME_LIMIT_BYTES = 128 * 1024 * 1024

# What one compiled grammar may take in the worker, of the memory that its plan counts for imports and small
# things. A schema of 100 fields takes 4 MB.
GRAMMAR_LIMIT_BYTES = 64 * 1024 * 1024

# Writing a compiled grammar out and reading it back takes longer than compiling it, for nested schemas ten to
# sixty times. One that is known to be quick, and to break nothing, is compiled once more where it is needed;
# the others are too slow for a thread that nobody can stop.
QUICK_S = 1.0


# What a row's place in a grammar may take before its first token. A schema's takes a tenth of a millisecond
# and no measurable memory; rules that are each only the next one take 0.3 s and 740 MB for 360 KB of text.
# Each row of a batch has one, and all of them wait for it.
BEGIN_LIMIT_S = 0.25
BEGIN_LIMIT_BYTES = 128 * 1024 * 1024


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
    """The compiled grammar, serialised; None for one that was quick (`QUICK_S`)."""

    number: int
    grammar: str | None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The compiler's own words. unread: it can't take the grammar, as against the grammar is too large."""

    number: int
    reason: str
    unread: bool = True


ToCompiler = Vocabulary | Job
FromCompiler = Ready | Done | Failed


def frame(message: ToCompiler | FromCompiler) -> bytes:
    """A message as it is written."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
