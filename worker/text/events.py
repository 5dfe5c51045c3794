"""What a row says while it runs: one closed union, the same for every protocol.

The engine produces these, in order, and each protocol's writer turns them into its own wire format; no
protocol has a lane of its own. A row's events end with exactly one `Finish` (after its `Usage`) or one
`Failure`. A call's events come as `ToolCallStart`, any number of `ToolCallArguments` whose texts concatenated
are one JSON object, `ToolCallEnd`; calls don't interleave. A call that the length limit cut has no end, and
its arguments are the beginning of an object; one that the model itself left open is closed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mlxpool.shared.errors import ApiError

FinishReason = Literal["stop", "length", "tool_calls"]
Lane = Literal["batch", "turns"]


class Text(msgspec.Struct, frozen=True):
    """Text of the answer. Never empty, and never a part of a stop string."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's reasoning, apart from the answer. Never empty."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins: its place among the answer's calls from 0, its id, the declared function's name."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True):
    """The call's arguments are complete."""

    index: int


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token as text (an incomplete character as U+FFFD), its bytes, its natural log-probability."""

    token: str
    data: bytes
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """One sampled token, and the likeliest at its place, the best first. An eos has none, and
    neither has a stop string. chars: what it added to the answer as it was written, markup and reasoning
    included: 0 for a special token, and for one that leaves a character incomplete."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    chars: int = 0


class Prefilled(msgspec.Struct, frozen=True):
    """The prompt is done and the answer begins: how many tokens it had, how many needed no work. A row says
    so once, before anything else. lane: as its `Usage` says."""

    prompt_tokens: int
    cached_tokens: int
    lane: Lane = "batch"


class Speculation(msgspec.Struct, frozen=True):
    """Tokens that were guessed ahead of the model, those of them that are in the answer, and how many passes
    of the model the answer took."""

    drafted: int
    accepted: int
    target_calls: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one row; every sampled token counts, an eos included. lane: `batch` for a row that
    shared its forward passes or could have, `turns` for a model whose rows can't. reasoning_tokens: of the
    sampled ones, those whose text was reasoning. speculation: None for a row that nothing was guessed for."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    lane: Lane = "batch"
    reasoning_tokens: int = 0
    speculation: Speculation | None = None


class Finish(msgspec.Struct, frozen=True):
    """The answer is complete. stop_sequence: the stop string that ended it, where one did."""

    reason: FinishReason
    stop_sequence: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """The row ends here with an error; nothing follows."""

    error: ApiError


ToolCall = ToolCallStart | ToolCallArguments | ToolCallEnd
# What the text machines produce; the rest is the engine's.
TextEvent = Text | Reasoning | ToolCall
Event = TextEvent | Prefilled | Logprobs | Usage | Finish | Failure
