"""The items of a response's output while they grow: which events each of them makes, and what it is at last.

One machine per kind of item. The worker's writer feeds it as the model speaks; a finished response is
replayed by feeding it what the item holds. An event here is its kind and its fields, without a number.
What is said between two flushes goes out as one delta. Owned by whoever writes the response; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from mlxpool.shared.api.response_object import seal

ItemStatus = Literal["in_progress", "completed", "incomplete"]

# The event's kind and its fields.
Told = tuple[str, dict[str, Any]]


class Item(Protocol):
    """One item. Call `begin` once, then `add` and `flush` as text comes, then `end` once."""

    def begin(self) -> list[Told]:
        """It is there, with nothing in it."""

    def add(self, text: str, logprobs: list[Any] | None = None) -> None:
        """More text. logprobs: of the tokens that made it, in the protocol's shape."""

    def flush(self) -> list[Told]:
        """What was added and not yet told."""

    def end(self, status: ItemStatus) -> list[Told]:
        """It is complete, or cut; with all that is still to tell."""

    def item(self, status: ItemStatus) -> dict[str, Any]:
        """The item as it is now."""


class _Texts:
    """Text that comes in pieces: all of it, and what is still to be told."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self.id = item_id
        self.output_index = output_index
        self._pieces: list[str] = []
        self._fresh: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str, logprobs: list[Any] | None = None) -> None:
        del logprobs  # only a message has a place for them
        self._pieces.append(text)
        self._fresh.append(text)

    def _take(self) -> str:
        fresh, self._fresh = "".join(self._fresh), []
        return fresh

    def _at(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.output_index, **fields}

    def _whole(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": self.output_index, "item": item}


class Message(_Texts):
    """A message of one part."""

    def __init__(self, item_id: str, output_index: int) -> None:
        super().__init__(item_id, output_index)
        self._logprobs: list[Any] = []
        self._fresh_logprobs: list[Any] = []

    def begin(self) -> list[Told]:
        added = {**self.item("in_progress"), "content": []}
        return [
            ("response.output_item.added", self._whole(added)),
            ("response.content_part.added", self._at(content_index=0, part=_output_text("", []))),
        ]

    def add(self, text: str, logprobs: list[Any] | None = None) -> None:
        super().add(text)
        self._logprobs += logprobs or ()
        self._fresh_logprobs += logprobs or ()

    def flush(self) -> list[Told]:
        delta = self._take()
        logprobs, self._fresh_logprobs = self._fresh_logprobs, []
        if not delta and not logprobs:
            return []
        fields = self._at(content_index=0, delta=delta, logprobs=logprobs)
        return [("response.output_text.delta", fields)]

    def end(self, status: ItemStatus) -> list[Told]:
        text, logprobs = self.text, self._logprobs
        part = _output_text(text, logprobs)
        return [
            *self.flush(),
            ("response.output_text.done", self._at(content_index=0, text=text, logprobs=logprobs)),
            ("response.content_part.done", self._at(content_index=0, part=part)),
            ("response.output_item.done", self._whole(self.item(status))),
        ]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_output_text(self.text, self._logprobs)],
        }


class Reasoning(_Texts):
    """What the model thought, as content; as_summary: where clients show a summary, in its place.
    sealed: whether the client wants it to hand back, too."""

    def __init__(
        self, item_id: str, output_index: int, as_summary: bool = False, sealed: bool = False
    ) -> None:
        super().__init__(item_id, output_index)
        self._as_summary = as_summary
        self._sealed = sealed
        self._index = "summary_index" if as_summary else "content_index"
        self._part_kind = "summary_text" if as_summary else "reasoning_text"
        self._part_event = "response.reasoning_summary_part" if as_summary else "response.content_part"
        self._text_event = f"response.reasoning_{'summary_text' if as_summary else 'text'}"

    def begin(self) -> list[Told]:
        added = {**self.item("in_progress"), "content": [], "summary": []}
        if self._sealed:
            added["encrypted_content"] = None
        return [
            ("response.output_item.added", self._whole(added)),
            (f"{self._part_event}.added", self._at(**{self._index: 0}, part=self._part(""))),
        ]

    def flush(self) -> list[Told]:
        delta = self._take()
        return [(f"{self._text_event}.delta", self._at(**{self._index: 0}, delta=delta))] if delta else []

    def end(self, status: ItemStatus) -> list[Told]:
        text = self.text
        return [
            *self.flush(),
            (f"{self._text_event}.done", self._at(**{self._index: 0}, text=text)),
            (f"{self._part_event}.done", self._at(**{self._index: 0}, part=self._part(text))),
            ("response.output_item.done", self._whole(self.item(status))),
        ]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        text = self.text
        parts = [self._part(text)]
        item: dict[str, Any] = {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": parts if self._as_summary else [],
            "content": [] if self._as_summary else parts,
        }
        if self._sealed:
            item["encrypted_content"] = seal(text)
        return item

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self._part_kind, "text": text}


class Call(_Texts):
    """A call of a function, or of a custom tool, whose input is plain text. namespace: the one that the
    client declared the tool in."""

    def __init__(
        self,
        item_id: str,
        output_index: int,
        call_id: str,
        name: str,
        namespace: str | None = None,
        custom: bool = False,
    ) -> None:
        super().__init__(item_id, output_index)
        self._call_id = call_id
        self._name = name
        self._namespace = namespace
        self._custom = custom
        self._text_name = "input" if custom else "arguments"
        self._text_event = f"response.{'custom_tool_call_input' if custom else 'function_call_arguments'}"

    def begin(self) -> list[Told]:
        added = {**self.item("in_progress"), self._text_name: ""}
        return [("response.output_item.added", self._whole(added))]

    def flush(self) -> list[Told]:
        delta = self._take()
        return [(f"{self._text_event}.delta", self._at(delta=delta))] if delta else []

    def end(self, status: ItemStatus) -> list[Told]:
        return [
            *self.flush(),
            (f"{self._text_event}.done", self._at(**{self._text_name: self.text})),
            ("response.output_item.done", self._whole(self.item(status))),
        ]

    def item(self, status: ItemStatus) -> dict[str, Any]:
        item: dict[str, Any] = {
            "id": self.id,
            "type": "custom_tool_call" if self._custom else "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            self._text_name: self.text,
        }
        if self._namespace is not None:
            item["namespace"] = self._namespace
        return item


def _output_text(text: str, logprobs: list[Any]) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": [*logprobs], "text": text}


def retold(item: Mapping[str, Any], output_index: int) -> list[Told]:
    """The events that made a finished item, each text in one delta. An item that no model wrote comes and is
    done, and so does one that holds more than these machines make."""
    machine = _machine(item, output_index)
    if machine is None:
        whole = {"output_index": output_index, "item": item}
        return [("response.output_item.added", whole), ("response.output_item.done", whole)]
    told = machine.begin()
    return told + machine.end("incomplete" if item.get("status") == "incomplete" else "completed")


def _machine(item: Mapping[str, Any], output_index: int) -> Item | None:
    try:
        made = _fed(item, output_index)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    # Only what it was made of can be told piece by piece.
    return made if made is not None and made.item(item.get("status", "completed")) == item else None


def _fed(item: Mapping[str, Any], output_index: int) -> Item | None:
    item_id: str = item["id"]
    kind = item["type"]
    if kind == "message":
        (part,) = item["content"]
        message = Message(item_id, output_index)
        message.add(part["text"], part["logprobs"])
        return message
    if kind == "reasoning":
        (part,) = item["content"] or item["summary"]
        reasoning = Reasoning(item_id, output_index, not item["content"], "encrypted_content" in item)
        reasoning.add(part["text"])
        return reasoning
    if kind in ("function_call", "custom_tool_call"):
        custom = kind == "custom_tool_call"
        call = Call(item_id, output_index, item["call_id"], item["name"], item.get("namespace"), custom)
        call.add(item["input" if custom else "arguments"])
        return call
    return None
