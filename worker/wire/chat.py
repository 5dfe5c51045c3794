"""The writer of `/v1/chat/completions`: events to a whole answer, or to SSE chunks.

A stream is one role chunk per choice, chunks of what is said, exactly one finish chunk per choice (usage on
the last of them, or in a chunk of its own when that was asked for), `[DONE]`; every chunk has the same id,
`created` and model, and speaks of one choice. The role chunk of the first choice is always the first event:
a parent that has said it already drops that one. What could not be enforced is said in `warnings`, of the
body or of the last finish chunk, for a stream's headers may have gone out before it was known. A failure
after the first byte is an error event that ends the stream. Log-probabilities go with the next chunk of
their choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from mlxpool.shared import errors
from mlxpool.worker.request.prepare import Prepared
from mlxpool.worker.text.events import (
    Event,
    Failure,
    Finish,
    FinishReason,
    Logprobs,
    Prefilled,
    Reasoning,
    Text,
    TextEvent,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from mlxpool.worker.wire.merge import merged
from mlxpool.worker.wire.usage import UsageBody, usage_body
from mlxpool.worker.wire.writer import Identity, Said

DONE = b"data: [DONE]\n\n"


class LikelyToken(msgspec.Struct, frozen=True, gc=False):
    """bytes: UTF-8, because a token may be half a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLikelihood(msgspec.Struct, frozen=True, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LikelyToken]


class LogprobsBody(msgspec.Struct, frozen=True):
    """One entry per sampled token, those of reasoning and calls included."""

    content: list[TokenLikelihood]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """arguments: JSON text, or the next piece of it. name: with the call's first piece only."""

    arguments: str
    name: str | None = None


class ToolCallBody(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, frozen=True):
    """content is null where the model only called functions. reasoning has two names among clients."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[ToolCallBody, ...] | msgspec.UnsetType = msgspec.UNSET


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: Message
    finish_reason: FinishReason
    logprobs: LogprobsBody | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: UsageBody
    warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: LogprobsBody | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One SSE event of a streamed answer."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class _Row:
    """What a choice has said so far: `said` for a whole answer; the rest for both ways."""

    def __init__(self) -> None:
        self.said: list[TextEvent] = []
        self.logprobs: list[Logprobs] = []
        self.usage = Usage(0, 0)
        self.reason: FinishReason | None = None


class ChatAnswer:
    """One answer, whole or streamed; feed it the rows' events in order. `ended` after the last one.

    warnings: sentences about what was asked for and could not be done.
    """

    def __init__(
        self,
        identity: Identity,
        include_usage: bool = False,
        choices: int = 1,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.ended = False
        self._identity = identity
        self._include_usage = include_usage
        self._rows = [_Row() for _ in range(choices)]
        self._warnings = warnings or msgspec.UNSET
        self._encoder = msgspec.json.Encoder()

    def opening(self) -> bytes:
        """A role chunk for every choice."""
        role = Delta(role="assistant", content="")
        return b"".join(self._chunk(index, role) for index in range(len(self._rows)))

    def keep_alive(self) -> bytes:
        """A chunk that says nothing and is like all the others, of a choice that has not ended."""
        running = (index for index, row in enumerate(self._rows) if row.reason is None)
        return self._chunk(next(running, 0), Delta())

    def write(self, said: Iterable[Said]) -> bytes:
        """Whole SSE events for these; what came together goes out together."""
        out: list[bytes] = []
        for index, event in self._without_logprobs(said):
            row = self._rows[index]
            match event:
                case Usage():
                    row.usage = event
                case Finish(reason):
                    out.append(self._finish(index, reason))
                case Failure(err):
                    self.ended = True
                    out.append(errors.stream_event(err))
                    break
                case ToolCallEnd() | Prefilled():
                    pass
                case _:
                    out.append(self._chunk(index, _delta(event)))
        return b"".join(out)

    def whole(self, said: Iterable[Said]) -> bytes:
        """The JSON body of a complete answer. Raises the ApiError of a Failure among the events."""
        for index, event in said:
            row = self._rows[index]
            match event:
                case Logprobs():
                    row.logprobs.append(event)
                case Usage():
                    row.usage = event
                case Finish(reason):
                    row.reason = reason
                case Failure(err):
                    raise err
                case Prefilled():
                    pass
                case Text() | Reasoning() | ToolCallStart() | ToolCallArguments() | ToolCallEnd():
                    row.said.append(event)
        return self._encoder.encode(
            Completion(
                id=self._identity.id,
                created=self._identity.created,
                model=self._identity.model,
                choices=tuple(
                    Choice(index, _message(row.said), row.reason or "stop", _logprobs_body(row.logprobs))
                    for index, row in enumerate(self._rows)
                ),
                usage=usage_body(row.usage for row in self._rows),
                warnings=self._warnings,
            )
        )

    def _without_logprobs(self, said: Iterable[Said]) -> list[Said]:
        """The other events, merged; log-probabilities are put aside for the next chunk of their choice."""
        rest: list[Said] = []
        for index, event in said:
            if isinstance(event, Logprobs):
                self._rows[index].logprobs.append(event)
            else:
                rest.append((index, event))
        return merged(rest)

    def _finish(self, index: int, reason: FinishReason) -> bytes:
        self._rows[index].reason = reason
        if any(row.reason is None for row in self._rows):
            return self._chunk(index, Delta(), reason)
        self.ended = True
        usage = usage_body(row.usage for row in self._rows)
        if not self._include_usage:
            return self._chunk(index, Delta(), reason, usage, self._warnings) + DONE
        return self._chunk(index, Delta(), reason, None, self._warnings) + self._event((), usage) + DONE

    def _chunk(
        self,
        index: int,
        delta: Delta,
        reason: FinishReason | None = None,
        usage: UsageBody | None = None,
        warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        row = self._rows[index]
        logprobs, row.logprobs = _logprobs_body(row.logprobs), []
        # Who asked for usage in a chunk of its own gets null in all the others, as the protocol has it.
        absent = None if self._include_usage else msgspec.UNSET
        choice = ChunkChoice(index, delta, reason, logprobs)
        return self._event((choice,), absent if usage is None else usage, warnings)

    def _event(
        self,
        choices: tuple[ChunkChoice, ...],
        usage: UsageBody | msgspec.UnsetType | None,
        warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        chunk = Chunk(
            id=self._identity.id,
            created=self._identity.created,
            model=self._identity.model,
            choices=choices,
            usage=usage,
            warnings=warnings,
        )
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"


def chat_writer(prepared: Prepared, identity: Identity) -> ChatAnswer:
    return ChatAnswer(identity, prepared.request.include_usage, len(prepared.plans), prepared.warnings)


def _delta(event: Event) -> Delta:
    match event:
        case Reasoning(text):
            return Delta(reasoning=text, reasoning_content=text)
        case ToolCallStart(index, call_id, name):
            return Delta(tool_calls=(ToolCallDelta(index, CalledFunction("", name), call_id, "function"),))
        case ToolCallArguments(index, text):
            return Delta(tool_calls=(ToolCallDelta(index, CalledFunction(text)),))
        case Text(text):
            return Delta(content=text)
    raise AssertionError(f"not a piece of an answer: {event}")


def _message(said: Sequence[TextEvent]) -> Message:
    text = "".join(event.text for event in said if isinstance(event, Text))
    reasoning = "".join(event.text for event in said if isinstance(event, Reasoning)) or msgspec.UNSET
    arguments: defaultdict[int, list[str]] = defaultdict(list)
    for event in said:
        if isinstance(event, ToolCallArguments):
            arguments[event.index].append(event.text)
    calls = tuple(
        ToolCallBody(start.id, CalledFunction("".join(arguments[start.index]), start.name))
        for start in said
        if isinstance(start, ToolCallStart)
    )
    return Message(
        role="assistant",
        content=text if text or not calls else None,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or msgspec.UNSET,
    )


def _logprobs_body(tokens: Sequence[Logprobs]) -> LogprobsBody | None:
    if not tokens:
        return None
    return LogprobsBody(
        [
            TokenLikelihood(
                entry.chosen.token,
                entry.chosen.logprob,
                list(entry.chosen.data),
                [_likely(token) for token in entry.top],
            )
            for entry in tokens
        ]
    )


def _likely(token: TokenLogprob) -> LikelyToken:
    return LikelyToken(token.token, token.logprob, list(token.data))
