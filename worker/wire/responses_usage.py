"""Token counts of a response: its protocol's names, and those that every protocol has beside its own."""

from __future__ import annotations

import msgspec

from mlxpool.worker.text.events import Lane, Speculation, Usage
from mlxpool.worker.wire.usage import PromptTokensDetails, usage_body


class InputTokensDetails(msgspec.Struct, frozen=True):
    """cache_write_tokens: none is billed for being kept."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """`usage`. lane, speculation: how the request ran, see `events.Usage`."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    lane: Lane
    speculation: Speculation | msgspec.UnsetType = msgspec.UNSET


def response_usage(usage: Usage) -> ResponseUsage:
    """The usage of a response, whose row says `usage`."""
    body = usage_body([usage])
    return ResponseUsage(
        input_tokens=body.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=body.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        total_tokens=body.total_tokens,
        prompt_tokens=body.prompt_tokens,
        completion_tokens=body.completion_tokens,
        prompt_tokens_details=body.prompt_tokens_details,
        lane=body.lane,
        speculation=body.speculation,
    )
