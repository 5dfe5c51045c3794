"""What the parent says in a stream where the worker can't: its opening, its keep-alives, its bad end.

A client that has waited 10 s for a queue, a load or a worker that still prepares would time out. So the
parent opens the stream itself. Every stream's id and creation time are made here and handed to the worker,
for when the request goes out nobody knows yet who will open it. A protocol is one class.
"""

from __future__ import annotations

import secrets
import time
from typing import Protocol

import msgspec

from mlxpool.shared import errors
from mlxpool.shared.errors import ApiError

# A stream that has waited this long is opened; after that it hears something this often. Clients' idle
# timers start at 15 s.
OPEN_AFTER_S = 10.0
KEEP_ALIVE_S = 10.0

_DONE = b"data: [DONE]\n\n"


class Preamble(Protocol):
    """The parent's part of one stream.

    response_id, created: of the answer, unix seconds. replaced: how many events a worker's stream begins with
    that say what `opening` has said.
    """

    response_id: str
    created: int
    replaced: int

    def opening(self) -> bytes:
        """The events that a stream begins with. Said at most once."""

    def keep_alive(self) -> bytes:
        """An event that says nothing."""

    def passed(self, data: bytes) -> bytes:
        """Whole events of the worker's as they go on behind an opening of the parent's."""

    def is_end(self, data: bytes) -> bool:
        """Whether these whole events end the stream: after them nothing may follow, not even an error."""

    def failure(self, err: ApiError, last: bytes) -> bytes:
        """The events that end a stream with this error. last: what was sent last, b"" for nothing yet."""


class ChatPreamble:
    """Chat: the role chunk of the first choice, chunks without content."""

    replaced = 1

    def __init__(self, model: str) -> None:
        self.response_id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._model = model

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def keep_alive(self) -> bytes:
        return self._chunk({})

    def passed(self, data: bytes) -> bytes:
        return data

    def is_end(self, data: bytes) -> bool:
        return data.endswith(_DONE)

    def failure(self, err: ApiError, last: bytes) -> bytes:  # noqa: ARG002  # no event counts the others
        return errors.stream_event(err, "openai")

    def _chunk(self, delta: dict[str, str]) -> bytes:
        body = {
            "id": self.response_id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self._model,
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        }
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


class CompletionPreamble:
    """Raw completions: chunks of no text. A worker's own stream has no opening that could come twice."""

    replaced = 0

    def __init__(self, model: str) -> None:
        self.response_id = f"cmpl-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self._model = model

    def opening(self) -> bytes:
        return self.keep_alive()

    def keep_alive(self) -> bytes:
        body = {
            "id": self.response_id,
            "object": "text_completion",
            "created": self.created,
            "model": self._model,
            "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}],
        }
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def passed(self, data: bytes) -> bytes:
        return data

    def is_end(self, data: bytes) -> bool:
        return data.endswith(_DONE)

    def failure(self, err: ApiError, last: bytes) -> bytes:  # noqa: ARG002  # no event counts the others
        return errors.stream_event(err, "openai")


class MessagesPreamble:
    """Messages: pings, which may come anywhere. `message_start` has the prompt's length, so it is the
    worker's."""

    replaced = 0

    def __init__(self) -> None:
        self.response_id = f"msg_{secrets.token_hex(12)}"
        self.created = int(time.time())

    def opening(self) -> bytes:
        return self.keep_alive()

    def keep_alive(self) -> bytes:
        return b'event: ping\ndata: {"type":"ping"}\n\n'

    def passed(self, data: bytes) -> bytes:
        return data

    def is_end(self, data: bytes) -> bool:
        return last_event(data).startswith((b"event: message_stop\n", b"event: error\n"))

    def failure(self, err: ApiError, last: bytes) -> bytes:  # noqa: ARG002  # no event counts the others
        return errors.stream_event(err, "anthropic")


def last_event(data: bytes) -> bytes:
    """The last of these whole events."""
    return data[data.rfind(b"\n\n", 0, -2) + 2 :] if b"\n\n" in data[:-2] else data
