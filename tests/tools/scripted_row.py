"""A chat that a scripted worker answers by itself: its text is the script's, its events are made quickly.

The benchmarks send a great many of them; every other request goes through the product's readers and writers
(scripted_wire.py), which have the same methods.
"""

from __future__ import annotations

import time
import uuid
from typing import Literal
from urllib.parse import unquote

import msgspec

from mlxpool.shared.control import (
    HEADER_ASKED_MODEL,
    HEADER_CREATED,
    HEADER_REQUEST_ID,
    HEADER_RESPONSE_ID,
    Launch,
)
from tests.tools.scripted_http import Request
from tests.tools.scripted_script import Script, TokenText


class Part(msgspec.Struct):
    """One part of a message that comes in parts; only its text is read."""

    text: str = ""


class Message(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[Part]

    def text(self) -> str:
        """The message as one string."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False


class Chat(msgspec.Struct):
    """The fields of a chat request that change a scripted answer; the others are not read."""

    messages: list[Message]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class Row:
    """One chat under way: what was asked, and how its answer is identified."""

    def __init__(self, request: Request, launch: Launch, script: Script) -> None:
        headers = request.headers
        chat = msgspec.json.decode(request.body, type=Chat)
        if not chat.messages:
            raise msgspec.ValidationError("Expected at least one message - at `$.messages`")
        self.prompt = chat.messages[-1].text()
        self.stream = chat.stream
        self.usage_apart = chat.stream_options is not None and chat.stream_options.include_usage
        limit = chat.max_completion_tokens or chat.max_tokens or script.tokens
        self.count = min(script.tokens, limit)
        self.finish: Literal["stop", "length"] = "stop" if script.tokens <= limit else "length"
        self.prompt_tokens = sum(len(message.text().split()) for message in chat.messages)
        self.faulty = script.fault_on in self.prompt
        self.text = TokenText(script.text, launch.model, self.prompt)
        self.done = 0
        self.request_id = headers.get(HEADER_REQUEST_ID.lower(), "")
        self.id = headers.get(HEADER_RESPONSE_ID.lower(), "") or f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(headers.get(HEADER_CREATED.lower(), 0) or time.time())
        self.model = unquote(headers.get(HEADER_ASKED_MODEL.lower(), "")) or launch.model
        # A chunk with one token's text is made by joining bytes: the benchmarks send a great many.
        mark = "\0"
        self._before, self._after = self.event([self._choice({"content": mark})]).split(
            msgspec.json.encode(mark), 1
        )

    def usage(self) -> dict[str, object]:
        """The usage so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.done,
            "total_tokens": self.prompt_tokens + self.done,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def event(self, choices: list[dict[str, object]], **more: object) -> bytes:
        """One event of the stream."""
        body = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
        }
        return b"data: " + msgspec.json.encode(body | {"choices": choices} | more) + b"\n\n"

    def token_event(self, index: int) -> bytes:
        """The event of one token."""
        return self._before + msgspec.json.encode(self.text(index)) + self._after

    def role_event(self) -> bytes:
        """The first event of a stream."""
        return self.event([self._choice({"role": "assistant", "content": ""})])

    def prefilled_events(self) -> bytes:
        """What is said once the prompt is done: nothing, in a chat."""
        return b""

    def silent_event(self) -> bytes:
        """A keep-alive."""
        return self.event([self._choice({})])

    def last_events(self) -> bytes:
        """Finish, usage and terminal marker."""
        end = [self._choice({}, self.finish)]
        if not self.usage_apart:
            return self.event(end, usage=self.usage()) + b"data: [DONE]\n\n"
        return self.event(end) + self.event([], usage=self.usage()) + b"data: [DONE]\n\n"

    def body(self) -> bytes:
        """The whole answer of a chat that is not streamed."""
        text = "".join(self.text(i) for i in range(self.done))
        message = {"role": "assistant", "content": text}
        body = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish}],
            "usage": self.usage(),
        }
        return msgspec.json.encode(body)

    @staticmethod
    def _choice(delta: dict[str, object], finish: str | None = None) -> dict[str, object]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
