"""What a stream had said when it was cut: the response's object and its output so far, out of its events.

Only streams that end badly are read, or ones too long to be held; every other is passed on unread. An item
that was not done is `incomplete`, with what it had. What is only handed on, items that are done and
log-probabilities, stays the bytes it came in: decoded they are five times as large. Pure; takes some
microseconds an event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mlxpool.shared.api.response_object import seal

from . import streams


class _Event(msgspec.Struct):
    type: str
    sequence_number: int
    output_index: int = 0
    content_index: int = 0
    summary_index: int = 0
    item: msgspec.Raw = msgspec.Raw()
    part: dict[str, Any] | None = None
    delta: str = ""
    logprobs: msgspec.Raw = msgspec.Raw(b"[]")
    response: msgspec.Raw = msgspec.Raw()


_events = msgspec.json.Decoder(_Event)
_objects = msgspec.json.Decoder(dict[str, Any])

# Of one item's log-probabilities: twenty alternatives for each of ten thousand tokens. A cut item that had
# more has none of them.
LOGPROB_BYTES = 16 * 2**20

# The event whose delta it is → the part's list in its item, or the item's own field.
_PART_OF = {
    "response.output_text.delta": "content",
    "response.reasoning_text.delta": "content",
    "response.reasoning_summary_text.delta": "summary",
}
_FIELD_OF = {
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}


class _Open:
    """An item that is being said."""

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item
        self.parts: dict[tuple[str, int], dict[str, Any]] = {}
        self.texts: dict[tuple[str, int], list[str]] = {}
        self.logprobs: dict[tuple[str, int], list[bytes]] = {}
        self._logprob_bytes = 0

    def note_logprobs(self, place: tuple[str, int], raw: bytes) -> None:
        """Some more of them, a JSON list."""
        inner = raw.strip()[1:-1].strip()
        self._logprob_bytes += len(inner)
        if self._logprob_bytes > LOGPROB_BYTES:
            self.logprobs.clear()
        elif inner:
            self.logprobs.setdefault(place, []).append(inner)

    def cut(self) -> dict[str, Any]:
        """The item as far as it was said."""
        item = {**self.item, "status": "incomplete"}
        for (field, index), part in sorted(self.parts.items(), key=lambda entry: entry[0]):
            whole = {**part, "text": "".join(self.texts.get((field, index), ()))}
            if "logprobs" in part:
                told = b",".join(self.logprobs.get((field, index), ()))
                whole["logprobs"] = msgspec.Raw(b"[%b]" % told)
            item[field] = [*item.get(field, ()), whole]
        for field in _FIELD_OF.values():
            if (field, 0) in self.texts:
                item[field] = item.get(field, "") + "".join(self.texts[field, 0])
        if "encrypted_content" in item:
            item["encrypted_content"] = seal("".join(text for texts in self.texts.values() for text in texts))
        return item


class Folding:
    """Feed it whole events in order. response: the object of the first, None before it. number: the last
    sequence_number, -1 before the first."""

    def __init__(self) -> None:
        self.response: dict[str, Any] | None = None
        self.number = -1
        self._done: dict[int, msgspec.Raw] = {}
        self._open: dict[int, _Open] = {}

    def feed(self, data: bytes) -> None:
        """Further events."""
        for text in streams.events_of(data):
            self._take(_events.decode(text))

    def output(self) -> msgspec.Raw:
        """The items so far, in order: a JSON list."""
        cut = {index: opened.cut() for index, opened in self._open.items()}
        items: dict[int, Any] = {**cut, **self._done}
        return msgspec.Raw(msgspec.json.encode([items[index] for index in sorted(items)]))

    def _take(self, event: _Event) -> None:
        self.number = event.sequence_number
        if event.type == "response.created":
            self.response = _objects.decode(event.response)
        elif event.type == "response.output_item.added":
            self._open[event.output_index] = _Open(_objects.decode(event.item))
        elif event.type == "response.output_item.done":
            self._open.pop(event.output_index, None)
            # A copy: what was decoded is a view of the whole event.
            self._done[event.output_index] = msgspec.Raw(bytes(event.item) or b"{}")
        elif (opened := self._open.get(event.output_index)) is None:
            return
        elif event.type == "response.content_part.added" and event.part is not None:
            opened.parts["content", event.content_index] = event.part
        elif event.type == "response.reasoning_summary_part.added" and event.part is not None:
            opened.parts["summary", event.summary_index] = event.part
        elif event.type in _PART_OF:
            field = _PART_OF[event.type]
            place = (field, event.summary_index if field == "summary" else event.content_index)
            opened.texts.setdefault(place, []).append(event.delta)
            opened.note_logprobs(place, bytes(event.logprobs))
        elif event.type in _FIELD_OF:
            opened.texts.setdefault((_FIELD_OF[event.type], 0), []).append(event.delta)
