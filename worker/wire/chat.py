"""The writer of `/v1/chat/completions`: events to a whole answer, or to SSE chunks.

A stream is one role chunk, content chunks, exactly one finish chunk (usage on it, or in a chunk of its
own when that was asked for), `[DONE]`; every chunk has the same id, `created` and model. A stream that
the parent has opened already goes on under the parent's id without a second role chunk. A failure after
the first byte is an error event that ends the stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from mlxpool.shared import errors
from mlxpool.worker.text.events import Event, Failure, Finish, FinishReason, Text, Usage

DONE = b"data: [DONE]\n\n"


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts as OpenAI names them; the same streamed or not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Message(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    finish_reason: FinishReason
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: UsageBody


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One SSE event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET


def usage_body(usage: Usage) -> UsageBody:
    """`Usage` in the protocol's shape."""
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
    )


class ChatAnswer:
    """One answer, whole or streamed; feed it the row's events in order. `ended` after the terminal one."""

    def __init__(self, answer_id: str, created: int, model: str, include_usage: bool) -> None:
        self.ended = False
        self._id, self._created, self._model = answer_id, created, model
        self._include_usage = include_usage
        self._usage = Usage(0, 0)
        self._encoder = msgspec.json.Encoder()

    def opening(self) -> bytes:
        """The role chunk, for a stream that nobody has opened yet."""
        return self._chunk(Delta(role="assistant", content=""))

    def keep_alive(self) -> bytes:
        """A chunk that says nothing and is like all the others."""
        return self._chunk(Delta())

    def write(self, events: Iterable[Event]) -> bytes:
        """Whole SSE events for these; texts that came together go out together."""
        out: list[bytes] = []
        texts: list[str] = []
        for event in events:
            if isinstance(event, Text):
                texts.append(event.text)
                continue
            if texts:
                out.append(self._chunk(Delta(content="".join(texts))))
                texts = []
            match event:
                case Usage():
                    self._usage = event
                case Finish(reason):
                    out.append(self._ending(reason))
                case Failure(err):
                    self.ended = True
                    out.append(errors.stream_event(err))
        if texts:
            out.append(self._chunk(Delta(content="".join(texts))))
        return b"".join(out)

    def whole(self, events: Iterable[Event]) -> bytes:
        """The JSON body of a complete answer. Raises the ApiError of a Failure among the events."""
        texts: list[str] = []
        reason: FinishReason = "stop"
        for event in events:
            match event:
                case Text(text):
                    texts.append(text)
                case Usage():
                    self._usage = event
                case Finish(ended):
                    reason = ended
                case Failure(err):
                    raise err
        choice = Choice(0, Message("assistant", "".join(texts)), reason)
        return self._encoder.encode(
            Completion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=(choice,),
                usage=usage_body(self._usage),
            )
        )

    def _ending(self, reason: FinishReason) -> bytes:
        self.ended = True
        usage = usage_body(self._usage)
        if not self._include_usage:
            return self._chunk(Delta(), reason, usage) + DONE
        last = self._event((), usage)
        return self._chunk(Delta(), reason) + last + DONE

    def _chunk(
        self, delta: Delta, reason: FinishReason | None = None, usage: UsageBody | None = None
    ) -> bytes:
        # Who asked for usage in a chunk of its own gets null in all the others, as the protocol has it.
        absent = None if self._include_usage else msgspec.UNSET
        return self._event((ChunkChoice(0, delta, reason),), absent if usage is None else usage)

    def _event(self, choices: tuple[ChunkChoice, ...], usage: UsageBody | msgspec.UnsetType | None) -> bytes:
        chunk = Chunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"
