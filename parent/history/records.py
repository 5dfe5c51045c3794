"""One stored response: everything that GET, a follow-up or a replay needs, without any other row.

Pure. A row's three large parts are compressed one by one, so that reading back one that was damaged finds out
by zlib's own checksum, and damage stays within its row.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Literal

import msgspec

from mlxpool.parent.faults import Damaged
from mlxpool.shared.api import response_object
from mlxpool.shared.errors import ApiError

_Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

UNFINISHED: frozenset[str] = frozenset({"queued", "in_progress"})

# A longer stream is kept without its events: a replay is made from the response then.
MAX_EVENT_BYTES = 8 * 2**20
# What a row costs besides its parts: its names, its index entries.
ROW_BYTES = 300
# Text shrinks to a third at the fastest level already; higher ones take ten times as long for a tenth more.
_LEVEL = 1


class Record(msgspec.Struct, frozen=True):
    """created: unix seconds. previous: the response this one goes on from. input: the conversation up to it,
    whole, a JSON list of items. response: its JSON object. events: as they were sent, in pieces of whole
    ones; None where it was not streamed, its stream was longer than MAX_EVENT_BYTES, or whoever read it back
    did not want them. items: ids of its output's items, empty in what was read back."""

    id: str
    created: float
    status: str
    model: str
    background: bool
    previous: str | None
    input: bytes
    response: bytes
    events: tuple[bytes, ...] | None = None
    items: tuple[str, ...] = ()

    @property
    def raw_bytes(self) -> int:
        """Its size before it is compressed."""
        return len(self.input) + len(self.response) + sum(map(len, self.events or ())) + ROW_BYTES


class Packed(msgspec.Struct, frozen=True):
    """A record as its row has it. bytes: what it counts against the limit."""

    input: bytes
    response: bytes
    events: bytes | None
    bytes: int


def pack(record: Record) -> Packed:
    """The compressed parts. Takes milliseconds per megabyte, without the interpreter's lock."""
    given = zlib.compress(record.input, _LEVEL)
    response = zlib.compress(record.response, _LEVEL)
    events = None
    if record.events is not None:
        packer = zlib.compressobj(_LEVEL)
        events = b"".join([*map(packer.compress, record.events), packer.flush()])
    return Packed(given, response, events, len(given) + len(response) + len(events or b"") + ROW_BYTES)


class _Row(msgspec.Struct, array_like=True):
    created: float
    status: _Status
    model: str
    background: int
    previous: str | None
    input: bytes
    response: bytes
    events: bytes | None


class _Response(msgspec.Struct):
    id: str
    status: str


_responses = msgspec.json.Decoder(_Response)
_inputs = msgspec.json.Decoder(list[msgspec.Raw])


def unpack(response_id: str, columns: Sequence[object]) -> Record:
    """The record of a row. columns: as `_Row` has them, and of whatever types a file may hold. Raises Damaged
    where any of it can't be what was written."""
    try:
        row = msgspec.convert(columns, _Row)
        record = Record(
            response_id,
            row.created,
            row.status,
            row.model,
            bool(row.background),
            row.previous,
            zlib.decompress(row.input),
            zlib.decompress(row.response),
            None if row.events is None else (zlib.decompress(row.events),),
        )
        _inputs.decode(record.input)
        told = _responses.decode(record.response)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise Damaged(f"its row can't be read ({err})") from err
    if told.id != response_id:
        raise Damaged(f"its row holds {told.id!r}")
    if not math.isfinite(record.created):
        raise Damaged(f"its row can't be read (it is of {record.created})")
    return record


def failed(record: Record, err: ApiError) -> Record:
    """What becomes of a response that was to go on and has no end of its own: failed, with nothing said."""
    response = msgspec.json.decode(record.response)
    response |= {"status": "failed", "error": response_object.failure(err)}
    return msgspec.structs.replace(
        record, status="failed", response=msgspec.json.encode(response), items=(), events=None
    )


class _Item(msgspec.Struct):
    id: str = ""


class _Told(msgspec.Struct):
    id: str
    status: str
    model: str = ""
    output: list[_Item] = []


_told = msgspec.json.Decoder(_Told)


def of_response(
    response: bytes,
    created: float,
    given: bytes,
    *,
    background: bool,
    previous: str | None,
    events: tuple[bytes, ...] | None,
) -> Record:
    """The record of a response object as it was answered. Raises msgspec errors for what is none."""
    told = _told.decode(response)
    items = tuple(item.id for item in told.output if item.id)
    return Record(
        told.id, created, told.status, told.model, background, previous, given, response, events, items
    )
