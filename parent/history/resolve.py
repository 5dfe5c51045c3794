"""What a body of /v1/responses says to the parent, and the body that a worker gets in its place.

Only the body's own fields are taken apart, each left as the bytes it came in: a conversation goes on by
joining bytes, and a body that needs nothing of the parent's is passed on as it came. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from mlxpool.shared.api import read
from mlxpool.shared.api.response_events import output_as_input
from mlxpool.shared.errors import ApiError, error
from mlxpool.shared.text import cut

from .records import UNFINISHED, Record

PREVIOUS = "previous_response_id"
# The parent's own affairs: a worker hears of none of them in a body.
_STRIPPED = (PREVIOUS,)
# Each may be an item of another response, which is read for it.
REFERENCES_LIMIT = 1024

_bodies = msgspec.json.Decoder(dict[str, msgspec.Raw])
_lists = msgspec.json.Decoder(list[msgspec.Raw])
_INPUT_INDEX = re.compile(r"\binput\[(\d+)\]")


class _Reference(msgspec.Struct):
    type: Any = None
    id: Any = None


class _Earlier(msgspec.Struct):
    output: list[dict[str, Any]] = []
    instructions: msgspec.Raw = msgspec.Raw(b"null")


_references = msgspec.json.Decoder(_Reference)
_earlier = msgspec.json.Decoder(_Earlier)


class Fields(Mapping[str, Any]):
    """A body's fields, each decoded when it is asked for."""

    def __init__(self, raws: Mapping[str, msgspec.Raw]) -> None:
        self._raws = raws

    def __getitem__(self, name: str) -> Any:
        """None for what no reader would take: whoever echoes it refuses nothing."""
        try:
            return msgspec.json.decode(self._raws[name])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def __iter__(self) -> Iterator[str]:
        return iter(self._raws)

    def __len__(self) -> int:
        return len(self._raws)


class Ask(msgspec.Struct, frozen=True):
    """One body. raws: its fields as they came. references: items that it names by their ids, by index."""

    body: bytes
    raws: dict[str, msgspec.Raw]
    previous: str | None
    store: bool
    background: bool
    references: dict[int, str]


class Resolved(msgspec.Struct, frozen=True):
    """What goes to a worker. body: stripped of what is the parent's. raws: its fields. input: its whole
    conversation as a JSON list, None where the body has none that is text or a list. shift: how many items of
    it stand before the client's own."""

    body: bytes
    raws: dict[str, msgspec.Raw]
    input: bytes | None
    shift: int = 0

    @property
    def fields(self) -> Fields:
        """For those who echo them."""
        return Fields(self.raws)


class Source(NamedTuple):
    """The items before a body's own, JSON of each, and what is said with them."""

    items: list[bytes]
    instructions: bytes

    @property
    def length(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.items))


def read_ask(body: bytes) -> Ask:
    """Raises ApiError 400 for what is no JSON object, or a field of the parent's with a wrong type."""
    try:
        return _read_ask(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise read.bad_json(body, err) from None
    except RecursionError:
        raise error("invalid_request", "the body is nested too deeply") from None


def _read_ask(body: bytes) -> Ask:
    raws = _bodies.decode(body)
    previous = read.string(PREVIOUS, _value(raws, PREVIOUS))
    store = read.boolean("store", _value(raws, "store"), True)
    background = read.boolean("background", _value(raws, "background"), False)
    # Where every answer is a stream the worker never sees what the client wrote.
    read.boolean("stream", _value(raws, "stream"), False)
    if background and not store:
        raise read.invalid(
            "background", "background works with stored responses alone; leave store out, or send store true"
        )
    return Ask(body, raws, previous, store, background, _references_in(raws.get("input")))


def source_of(record: Record) -> Source:
    """What a response leaves for whoever goes on from it. Raises ApiError 400 while it still runs."""
    if record.status in UNFINISHED:
        raise read.invalid(
            PREVIOUS,
            f"response {cut(record.id)!r} is {record.status}; go on from it when it has ended, or cancel it",
        )
    earlier = _earlier.decode(record.response)
    said = [msgspec.json.encode(item) for item in output_as_input(earlier.output)]
    return Source([*map(bytes, _lists.decode(record.input)), *said], bytes(earlier.instructions))


def resolve(
    ask: Ask,
    source: Source | None,
    items: Mapping[str, bytes],
    *,
    max_body_bytes: int,
    forced: Mapping[str, object] = {},
) -> Resolved:
    """The body for a worker.

    source: of the response that it goes on from. items: by its id, JSON of the item that stands in place of
    each reference. forced: fields that are to have other values than the client's. Raises ApiError 400 for an
    input that nothing can be put before; 413 where the whole conversation is longer than a body may be.
    """
    raws = {name: raw for name, raw in ask.raws.items() if name not in _STRIPPED}
    given = ask.raws.get("input")
    for name, value in forced.items():
        raws[name] = msgspec.Raw(msgspec.json.encode(value))
    if source is None and not ask.references:
        changed = len(raws) < len(ask.raws) or any(raws[name] != ask.raws.get(name) for name in forced)
        body = msgspec.json.encode(raws) if changed else ask.body
        return Resolved(body, raws, _as_list(given))
    own = _items(given)
    for index, item_id in ask.references.items():
        own[index] = items[item_id]
    before = source.items if source is not None else []
    # Asked before anything is joined: an item may be named a thousand times.
    check_length(sum(map(len, before)) + sum(map(len, own)), max_body_bytes, ask)
    whole = b"[%b]" % b",".join([*before, *own])
    raws["input"] = msgspec.Raw(whole)
    if source is not None and _is_absent(raws.get("instructions")):
        raws["instructions"] = msgspec.Raw(source.instructions)
    body = msgspec.json.encode(raws)
    check_length(len(body), max_body_bytes, ask)
    return Resolved(body, raws, whole, len(before))


def check_length(length: int, max_body_bytes: int, ask: Ask) -> None:
    """Raises ApiError 413 for a conversation of this many bytes or more."""
    if length > max_body_bytes:
        raise error(
            "body_too_large",
            f"the conversation is {length} bytes with what came before, over the limit of"
            f" {max_body_bytes // 2**20} MiB; shorten it with POST /v1/responses/compact and go on from that",
            param="input" if ask.previous is None else PREVIOUS,
        )


def items_of(record: Record) -> dict[str, bytes | None]:
    """By its id, each item of its output as input has it; None for a call that was cut."""
    items: dict[str, bytes | None] = {}
    for item in _earlier.decode(record.response).output:
        if isinstance(item_id := item.get("id"), str):
            said = output_as_input([item])
            items[item_id] = msgspec.json.encode(said[0]) if said else None
    return items


def shifted(text: str, shift: int) -> str:
    """An error's text whose `input[N]` counts from the first of the client's own items."""

    def back(found: re.Match[str]) -> str:
        index = int(found[1])
        return f"input[{index - shift}]" if index >= shift else found[0]

    return _INPUT_INDEX.sub(back, text) if shift else text


def shifted_error(err: ApiError, shift: int) -> ApiError:
    """`shifted` in message and param."""
    param = None if err.param is None else shifted(err.param, shift)
    return ApiError(
        err.status, err.code, shifted(err.message, shift), param=param, retry_after_s=err.retry_after_s
    )


def _value(raws: Mapping[str, msgspec.Raw], name: str) -> Any:
    return msgspec.json.decode(raws[name]) if name in raws else None


def _is_absent(raw: msgspec.Raw | None) -> bool:
    return raw is None or bytes(raw) == b"null"


def _references_in(raw: msgspec.Raw | None) -> dict[int, str]:
    if raw is None or b'"item_reference"' not in bytes(raw) or not bytes(raw).startswith(b"["):
        return {}
    found = {}
    for index, item in enumerate(_lists.decode(raw)):
        if b'"item_reference"' not in bytes(item) or not bytes(item).startswith(b"{"):
            continue
        reference = _references.decode(item)
        if reference.type == "item_reference":
            found[index] = read.filled(f"input[{index}].id", reference.id)
    if len(found) > REFERENCES_LIMIT:
        raise read.invalid(
            "input",
            f"input refers to {len(found)} items, and at most {REFERENCES_LIMIT} work; send"
            f" {PREVIOUS}, or the items themselves",
        )
    return found


def _as_list(raw: msgspec.Raw | None) -> bytes | None:
    text = b"" if raw is None else bytes(raw)
    if text.startswith(b"["):
        return text
    if text.startswith(b'"'):
        return b'[{"type":"message","role":"user","content":%b}]' % text
    return None


def _items(raw: msgspec.Raw | None) -> list[bytes]:
    """Of an input that others go before; none where there is none."""
    if _is_absent(raw):
        return []
    text = _as_list(raw)
    if text is None:
        shown = read.quoted(_value({"input": raw}, "input")) if raw is not None else ""
        raise read.invalid("input", f"input must be a string or a list of items, not {shown}")
    return [bytes(item) for item in _lists.decode(text)]
