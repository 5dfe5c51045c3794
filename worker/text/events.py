"""What a row says while it runs: one closed union, the same for every protocol.

The engine produces these, in order, and each protocol's writer turns them into its own wire format; no
protocol has a lane of its own. A row's events end with exactly one `Finish` (after its `Usage`) or one
`Failure`. `Reasoning`, the `ToolCall…` events and `Logprobs` have their place in the order already; what
produces them comes with reasoning, tools and log-probabilities.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mlxpool.shared.errors import ApiError

FinishReason = Literal["stop", "length", "tool_calls"]


class Text(msgspec.Struct, frozen=True):
    """Text of the answer. Never empty, and never a part of a stop string."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's reasoning, apart from the answer."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins: its place among the answer's calls, its id, the function's name."""

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


class Logprobs(msgspec.Struct, frozen=True):
    """One sampled token with its log-probability and the best alternatives, (token text, logprob) each."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """Token counts of the whole request; every sampled token counts, an eos included."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Finish(msgspec.Struct, frozen=True):
    """The answer is complete. stop_sequence: the stop string that ended it, where one did."""

    reason: FinishReason
    stop_sequence: str | None = None


class Failure(msgspec.Struct, frozen=True):
    """The row ends here with an error; nothing follows."""

    error: ApiError


ToolCall = ToolCallStart | ToolCallArguments | ToolCallEnd
Event = Text | Reasoning | ToolCall | Logprobs | Usage | Finish | Failure
