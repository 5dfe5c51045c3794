"""The writer of `/v1/completions`: the texts of raw prompts, whole or as SSE chunks.

Choices are numbered prompt by prompt. A stream is chunks of text, exactly one finish chunk per choice (usage
as chat has it), `[DONE]`. Log-probabilities have this protocol's own older shape: lists beside each other, a
token that is no whole character as `bytes:\\xf0\\x9f`, and where in the answer's text each begins. A model of
chat may begin with reasoning or a call here too: nothing looks for them, it is all text. What could not be
enforced is said in `warnings`, of the whole answer or of the last finish chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from mlxpool.shared import errors
from mlxpool.worker.request.prepare import Prepared
from mlxpool.worker.text.events import (
    Failure,
    Finish,
    FinishReason,
    Logprobs,
    Text,
    TokenLogprob,
    Usage,
)
from mlxpool.worker.wire.chat import DONE
from mlxpool.worker.wire.merge import merged
from mlxpool.worker.wire.usage import UsageBody, usage_body
from mlxpool.worker.wire.writer import Identity, Said


class LogprobsBody(msgspec.Struct, frozen=True):
    """Lists of equal length, an entry per token. text_offset: characters from the beginning of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(msgspec.Struct, frozen=True):
    """text: all of it, or the next piece in a chunk, whose finish_reason is null but in the last."""

    index: int
    text: str
    finish_reason: FinishReason | None
    logprobs: LogprobsBody | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: UsageBody | msgspec.UnsetType | None = msgspec.UNSET
    warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class _Row:
    """What a choice has said so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.heard: list[Logprobs] = []
        self.usage = Usage(0, 0)
        self.reason: FinishReason | None = None
        self._offset = 0  # characters of its text that the tokens heard of make up

    def logprobs(self) -> LogprobsBody | None:
        """Those heard since it was asked last."""
        heard, self.heard = self.heard, []
        if not heard:
            return None
        offsets = []
        for entry in heard:
            offsets.append(self._offset)
            self._offset += entry.chars
        return LogprobsBody(
            [_named(entry.chosen) for entry in heard],
            [entry.chosen.logprob for entry in heard],
            [_by_name((*entry.top, entry.chosen)) for entry in heard],
            offsets,
        )


class CompletionAnswer:
    """One answer, whole or streamed. rows: choices of all prompts; choices: those of each.

    warnings: sentences about what was asked for and could not be done.
    """

    def __init__(
        self,
        identity: Identity,
        include_usage: bool = False,
        rows: int = 1,
        choices: int = 1,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.ended = False
        self._identity = identity
        self._include_usage = include_usage
        self._rows = [_Row() for _ in range(rows)]
        self._choices = choices
        self._warnings = warnings or msgspec.UNSET
        self._encoder = msgspec.json.Encoder()

    def opening(self) -> bytes:
        """Nothing is known before there is text."""
        return b""

    def keep_alive(self) -> bytes:
        """A chunk without text, of a choice that has not ended."""
        running = (index for index, row in enumerate(self._rows) if row.reason is None)
        return self._chunk(next(running, 0), "")

    def write(self, said: Iterable[Said]) -> bytes:
        """Whole SSE events for these; what came together goes out together."""
        out: list[bytes] = []
        rest: list[Said] = []
        for index, event in said:
            if isinstance(event, Logprobs):
                self._rows[index].heard.append(event)
            else:
                rest.append((index, event))
        for index, event in merged(rest):
            match event:
                case Text(text):
                    out.append(self._chunk(index, text))
                case Usage():
                    self._rows[index].usage = event
                case Finish(reason):
                    out.append(self._finish(index, reason))
                case Failure(err):
                    self.ended = True
                    out.append(errors.stream_event(err))
                    break
                case _:
                    pass
        return b"".join(out)

    def whole(self, said: Iterable[Said]) -> bytes:
        """The JSON body of a complete answer. Raises the ApiError of a Failure among the events."""
        for index, event in said:
            row = self._rows[index]
            match event:
                case Text(text):
                    row.texts.append(text)
                case Logprobs():
                    row.heard.append(event)
                case Usage():
                    row.usage = event
                case Finish(reason):
                    row.reason = reason
                case Failure(err):
                    raise err
                case _:
                    pass
        choices = tuple(
            Choice(index, "".join(row.texts), row.reason or "stop", row.logprobs())
            for index, row in enumerate(self._rows)
        )
        return self._encoder.encode(self._completion(choices, self._usage(), self._warnings))

    def _usage(self) -> UsageBody:
        return usage_body((row.usage for row in self._rows), self._choices)

    def _finish(self, index: int, reason: FinishReason) -> bytes:
        self._rows[index].reason = reason
        if any(row.reason is None for row in self._rows):
            return self._chunk(index, "", reason)
        self.ended = True
        if not self._include_usage:
            return self._chunk(index, "", reason, self._usage(), self._warnings) + DONE
        return self._chunk(index, "", reason, None, self._warnings) + self._event((), self._usage()) + DONE

    def _chunk(
        self,
        index: int,
        text: str,
        reason: FinishReason | None = None,
        usage: UsageBody | None = None,
        warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        # Who asked for usage in a chunk of its own gets null in all the others, as the protocol has it.
        absent = None if self._include_usage else msgspec.UNSET
        choice = Choice(index, text, reason, self._rows[index].logprobs())
        return self._event((choice,), absent if usage is None else usage, warnings)

    def _event(
        self,
        choices: tuple[Choice, ...],
        usage: UsageBody | msgspec.UnsetType | None,
        warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        return b"data: " + self._encoder.encode(self._completion(choices, usage, warnings)) + b"\n\n"

    def _completion(
        self,
        choices: tuple[Choice, ...],
        usage: UsageBody | msgspec.UnsetType | None,
        warnings: tuple[str, ...] | msgspec.UnsetType,
    ) -> Completion:
        return Completion(
            id=self._identity.id,
            created=self._identity.created,
            model=self._identity.model,
            choices=choices,
            usage=usage,
            warnings=warnings,
        )


def completion_writer(prepared: Prepared, identity: Identity) -> CompletionAnswer:
    request = prepared.request
    return CompletionAnswer(
        identity, request.include_usage, len(prepared.plans), request.n, prepared.warnings
    )


def _named(token: TokenLogprob) -> str:
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _by_name(tokens: Sequence[TokenLogprob]) -> dict[str, float]:
    """Of tokens that read the same the likeliest, which comes first."""
    named: dict[str, float] = {}
    for token in tokens:
        named.setdefault(_named(token), token.logprob)
    return named
