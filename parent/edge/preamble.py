"""What the parent says in a stream where the worker can't: its opening, its keep-alives, its bad end.

A client that has waited 10 s for a queue, a load or a worker that still prepares would time out. So the
parent opens the stream itself. Every stream's id and creation time are made here and handed to the worker,
for when the request goes out nobody knows yet who will open it. A protocol is one class.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from mlxpool.parent.history import streams
from mlxpool.shared import errors
from mlxpool.shared.api import response_events, response_object
from mlxpool.shared.errors import ApiError

# A stream that has waited this long is opened; after that it hears something this often. Clients' idle
# timers start at 15 s.
OPEN_AFTER_S = 10.0
KEEP_ALIVE_S = 10.0

_DONE = b"data: [DONE]\n\n"

_MESSAGE_ENDS = (b"event: message_stop\n", b"event: error\n")


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

    async def failure(self, err: ApiError) -> bytes:
        """The events that end a stream with this error. May take a while where what was said has its part in
        them; b"" where it turns out that the stream had ended."""


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

    async def failure(self, err: ApiError) -> bytes:
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

    async def failure(self, err: ApiError) -> bytes:
        return errors.stream_event(err, "openai")


class MessagesPreamble:
    """Messages: pings, which may come anywhere. `message_start` has the prompt's length, so it is the
    worker's. request_id: errors name it."""

    replaced = 0

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.response_id = f"msg_{secrets.token_hex(12)}"
        self.created = int(time.time())

    def opening(self) -> bytes:
        return self.keep_alive()

    def keep_alive(self) -> bytes:
        return b'event: ping\ndata: {"type":"ping"}\n\n'

    def passed(self, data: bytes) -> bytes:
        return data

    def is_end(self, data: bytes) -> bool:
        return data.startswith(_MESSAGE_ENDS, streams.last_event(data))

    async def failure(self, err: ApiError) -> bytes:
        return errors.stream_event(err, "anthropic", self._request_id)


class ResponsesPreamble:
    """Responses: `response.created`, then `response.in_progress` as often as needed. Events are numbered: the
    worker's go on from the parent's. Its bad end has what was said in it: that is for whoever recorded it.

    fields: of the body, echoed by the object. previous: the response that this one goes on from.
    """

    # created and in_progress.
    replaced = 2

    def __init__(self, model: str, fields: Mapping[str, Any], previous: str | None = None) -> None:
        self.response_id = f"resp_{secrets.token_hex(24)}"
        self.created = int(time.time())
        self._model = model
        self._fields = fields
        self._previous = previous
        self._said = 0

    def opening(self) -> bytes:
        return self._event("response.created")

    def keep_alive(self) -> bytes:
        return self._event("response.in_progress")

    def passed(self, data: bytes) -> bytes:
        more = self._said - self.replaced
        return streams.renumbered(data, more) if more else data

    def is_end(self, data: bytes) -> bool:
        return streams.ends(data)

    def _event(self, kind: str) -> bytes:
        data = response_events.event(kind, self._said, response=self._response("in_progress"))
        self._said += 1
        return data

    def _response(self, status: str) -> dict[str, Any]:
        return response_object.new_response(
            self._fields,
            id=self.response_id,
            created=self.created,
            model=self._model,
            previous=self._previous,
            status=status,
        )
