"""A strict reader of server-sent events, for tests: what a lenient client would forgive is an error here.

Every event is complete and ends with an empty line, every line is a field that this project sends, data is
UTF-8, and nothing follows `[DONE]`. `read_answer` and `read_broken` take an HTTP answer off a socket without
a client library in between that would repair, hide or retry.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


class Malformed(AssertionError):
    """The stream breaks its framing; the message says where and how."""


@dataclass(frozen=True)
class Event:
    """One event: its name ("" for unnamed ones) and its data."""

    data: str
    name: str = ""

    def json(self) -> Any:
        """The data as JSON. Raises Malformed."""
        try:
            return json.loads(self.data)
        except ValueError as err:
            raise Malformed(f"data is not JSON: {self.data[:200]!r}: {err}") from None


class Reader:
    """Events from bytes in whatever pieces they come."""

    def __init__(self) -> None:
        self._rest = b""
        self.done = False

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete. Raises Malformed."""
        if self.done and data:
            raise Malformed(f"bytes after [DONE]: {data[:200]!r}")
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        events = []
        for block in blocks:
            if self.done:
                raise Malformed(f"an event after [DONE]: {block[:200]!r}")
            events.append(_event(block))
            self.done = events[-1].data == DONE
        if self.done and self._rest:
            raise Malformed(f"bytes after [DONE]: {self._rest[:200]!r}")
        return events

    def close(self) -> None:
        """The stream has ended. Raises Malformed when it ended inside an event."""
        if self._rest:
            raise Malformed(f"the stream ends inside an event: {self._rest[:200]!r}")


def _event(block: bytes) -> Event:
    name, data = "", []
    try:
        lines = block.decode("utf-8").split("\n")
    except UnicodeDecodeError as err:
        raise Malformed(f"not UTF-8: {block[:200]!r}: {err}") from None
    for line in lines:
        if line.startswith("data: "):
            data.append(line[6:])
        elif line.startswith("event: ") and not name:
            name = line[7:]
        else:
            raise Malformed(f"not a field of an event: {line[:200]!r}")
    if not data:
        raise Malformed(f"an event without data: {block[:200]!r}")
    return Event("\n".join(data), name)


def read(body: bytes, *, whole: bool = True) -> list[Event]:
    """All events of a stream. whole: it must end with [DONE]; else it may end anywhere between events."""
    reader = Reader()
    events = reader.feed(body)
    reader.close()
    if whole and not reader.done:
        raise Malformed("the stream ends without [DONE]")
    return events


@dataclass
class ChatStream:
    """What a chat stream said, put together."""

    text: str = ""
    roles: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    created: set[int] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def read_chat(body: bytes, *, whole: bool = True) -> ChatStream:
    """A chat stream put together. Raises Malformed for text after its finish, or two finishes."""
    chat = ChatStream()
    for event in read(body, whole=whole):
        if event.data != DONE:
            _add(chat, event.json())
    if whole and chat.finish is None and chat.error is None:
        raise Malformed("the stream ends without a finish_reason or an error")
    return chat


def _add(chat: ChatStream, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        chat.error = chunk["error"]
        return
    chat.ids.add(chunk["id"])
    chat.created.add(chunk["created"])
    chat.models.add(chunk["model"])
    if chunk.get("usage") is not None:
        chat.usage = chunk["usage"]
    for choice in chunk["choices"]:
        if chat.finish is not None:
            raise Malformed(f"a choice after the finish: {choice}")
        if "role" in choice["delta"]:
            chat.roles.append(choice["delta"]["role"])
        chat.text += choice["delta"].get("content") or ""
        chat.finish = choice.get("finish_reason")


def read_answer(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, lower-case headers and body of the one answer on this connection; closes it.

    Raises Malformed when the answer is shorter than its framing says.
    """
    status, headers, body, complete = _read_http(client)
    if not complete:
        raise Malformed(f"the answer ends early, after {len(body)} bytes of its body: {body[-200:]!r}")
    return status, headers, body


def read_broken(client: socket.socket) -> bytes:
    """The body that arrived of an answer that must end early; closes the connection. Raises Malformed."""
    *_, body, complete = _read_http(client)
    if complete:
        raise Malformed(f"the answer is complete: {body[-200:]!r}")
    return body


def _read_http(client: socket.socket) -> tuple[int, dict[str, str], bytes, bool]:
    with client:
        raw = b""
        try:
            while piece := client.recv(1 << 16):
                raw += piece
        except ConnectionResetError:
            # A peer that was killed with unread input resets; what came before counts all the same.
            pass
    head, separator, rest = raw.partition(b"\r\n\r\n")
    if not separator:
        return 0, {}, raw, False
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status = int(status_line.split(" ")[1])
    if headers.get("transfer-encoding") == "chunked":
        return status, headers, *_unchunk(rest)
    return status, headers, rest, len(rest) == int(headers.get("content-length", -1))


def _unchunk(rest: bytes) -> tuple[bytes, bool]:
    """The body inside chunked framing, and whether its last chunk came."""
    body = b""
    while True:
        size_line, separator, after = rest.partition(b"\r\n")
        if not separator:
            return body, False
        size = int(size_line, 16)
        if size == 0:
            return body, after == b"\r\n"
        body += after[:size]
        if len(after) < size + 2:
            return body, False
        rest = after[size + 2 :]
