"""The writer of `/v1/messages`: Anthropic's events, or a whole message.

A stream begins with `message_start` when the prompt is done, for that event carries the prompt's counts;
until then there are pings alone. Then the blocks, each with a start, deltas and a stop, `message_delta` with
the reason and the counts, `message_stop`. A failure is an `error` event and the end. Clients keep a block of
thinking only with a signature: ours says nothing and is the same for all. What was left out or could not be
enforced is said in `warnings`, of the whole message or of `message_delta`: clients leave alone what they
don't know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from mlxpool.shared import errors
from mlxpool.shared.api import tool_use_ids
from mlxpool.shared.api.anthropic import Shown
from mlxpool.worker.request.prepare import Prepared
from mlxpool.worker.text.events import Failure, Finish, Lane, Logprobs, Prefilled, Speculation, Usage
from mlxpool.worker.wire.merge import merged
from mlxpool.worker.wire.message_blocks import Begun, Blocks, Ended, More, Step
from mlxpool.worker.wire.usage import PromptTokensDetails, speculation_of
from mlxpool.worker.wire.writer import Identity, Said

SIGNATURE = "bWx4cG9vbA=="

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_REASONS: dict[str, StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageUsage(msgspec.Struct, frozen=True):
    """Anthropic's counts, of which the first three are the prompt, and those of every protocol here."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    lane: Lane
    speculation: Speculation | msgspec.UnsetType = msgspec.UNSET


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A whole message, or what is known of one at its beginning."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


class MessageAnswer:
    """One answer, whole or streamed; feed it its row's events in order. `ended` after the last one.

    shown: what of the answer the client wants to see. warnings: sentences about what was asked for and could
    not be done.
    """

    def __init__(
        self,
        identity: Identity,
        shown: Shown = Shown(),  # noqa: B008 - frozen
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.ended = False
        self._warnings = warnings
        self._identity = identity
        self._shown = shown
        self._blocks = Blocks()
        self._begun = False
        self._usage = Usage(0, 0)
        self._encoder = msgspec.json.Encoder()

    def opening(self) -> bytes:
        """Nothing: the first event has the prompt's counts."""
        return b""

    def keep_alive(self) -> bytes:
        return PING

    def write(self, said: Iterable[Said]) -> bytes:
        """Whole SSE events for these; what came together goes out together."""
        out: list[bytes] = []
        for _, event in merged(said):
            match event:
                case Prefilled(prompt, cached, lane):
                    self._usage = Usage(prompt, 0, cached, lane)
                    out.append(self._begin())
                case Usage():
                    self._usage = event
                case Finish():
                    out += [self._begin(), *map(self._step, self._blocks.end()), self._finish(event)]
                    self.ended = True
                case Failure(err):
                    out.append(errors.stream_event(err, "anthropic", self._identity.request_id))
                    self.ended = True
                    break
                case Logprobs():
                    pass
                case _:
                    out += [self._begin(), *map(self._step, self._blocks.add(event))]
        return b"".join(out)

    def whole(self, said: Iterable[Said]) -> bytes:
        """The JSON body of a complete message. Raises the ApiError of a Failure among the events."""
        steps: list[Step] = []
        end = Finish("stop")
        for _, event in said:
            match event:
                case Usage():
                    self._usage = event
                case Finish():
                    end = event
                    steps += self._blocks.end()
                case Failure(err):
                    raise err
                case Prefilled() | Logprobs():
                    pass
                case _:
                    steps += self._blocks.add(event)
        reason, stop = _stop_of(end)
        return self._encoder.encode(self._message(self._content(steps), reason, stop, self._warnings))

    def _begin(self) -> bytes:
        """`message_start`, once."""
        if self._begun:
            return b""
        self._begun = True
        return self._event("message_start", message=self._message([], None, None))

    def _message(
        self,
        content: list[dict[str, Any]],
        reason: StopReason | None,
        stop: str | None,
        warnings: tuple[str, ...] = (),
    ) -> Message:
        return Message(
            id=self._identity.id,
            model=self._identity.model,
            content=content,
            stop_reason=reason,
            stop_sequence=stop,
            usage=message_usage(self._usage),
            warnings=warnings or msgspec.UNSET,
        )

    def _step(self, step: Step) -> bytes:
        match step:
            case Begun(index):
                return self._event("content_block_start", index=index, content_block=_empty_block(step))
            case More(index, kind, text):
                if kind == "thinking" and not self._shown.thinking:
                    return b""
                name, field = _DELTAS[kind]
                return self._event("content_block_delta", index=index, delta={"type": name, field: text})
            case Ended(index, kind):
                signed = b""
                if kind == "thinking":
                    delta = {"type": "signature_delta", "signature": SIGNATURE}
                    signed = self._event("content_block_delta", index=index, delta=delta)
                return signed + self._event("content_block_stop", index=index)

    def _content(self, steps: Iterable[Step]) -> list[dict[str, Any]]:
        """The blocks that these steps come to."""
        blocks: list[dict[str, Any]] = []
        texts: list[str] = []
        for step in steps:
            match step:
                case Begun():
                    blocks.append(_empty_block(step))
                    texts = []
                case More(_, _, text):
                    texts.append(text)
                case Ended(_, kind, whole):
                    text = "".join(texts)
                    if kind == "tool_use":
                        # What a limit cut is no JSON: that something is missing, `max_tokens` says.
                        blocks[-1]["input"] = msgspec.Raw(text.encode()) if whole and text else {}
                    elif kind == "text":
                        blocks[-1]["text"] = text
                    else:
                        blocks[-1]["thinking"] = text if self._shown.thinking else ""
                        blocks[-1]["signature"] = SIGNATURE
        return blocks

    def _finish(self, end: Finish) -> bytes:
        reason, stop = _stop_of(end)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        more = {"warnings": self._warnings} if self._warnings else {}
        last = self._event("message_delta", delta=delta, usage=message_usage(self._usage), **more)
        return last + self._event("message_stop")

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = self._encoder.encode({"type": kind, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def message_writer(prepared: Prepared, identity: Identity) -> MessageAnswer:
    own = prepared.asked.own
    return MessageAnswer(identity, own if isinstance(own, Shown) else Shown(), prepared.warnings)


def message_usage(usage: Usage) -> MessageUsage:
    """A row's counts; what the cache gave is told apart from what had to be read."""
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        lane=usage.lane,
        speculation=speculation_of([usage]),
    )


def _stop_of(end: Finish) -> tuple[StopReason, str | None]:
    if end.reason == "stop" and end.stop_sequence is not None:
        return "stop_sequence", end.stop_sequence
    return _REASONS[end.reason], None


def _empty_block(begun: Begun) -> dict[str, Any]:
    if begun.call is not None:
        call = begun.call
        return {"type": "tool_use", "id": tool_use_ids.encode(call.id), "name": call.name, "input": {}}
    if begun.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}
