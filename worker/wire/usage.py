"""Token counts in OpenAI's shape, the same for every protocol that has it, streamed or not."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mlxpool.worker.text.events import Lane, Speculation, Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """`usage`. lane, speculation: how the request ran, see `events.Usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    lane: Lane
    speculation: Speculation | msgspec.UnsetType = msgspec.UNSET


def speculation_of(rows: Iterable[Usage]) -> Speculation | msgspec.UnsetType:
    """What was guessed for these rows together; unset where nothing was for any."""
    told = [row.speculation for row in rows if row.speculation is not None]
    if not told:
        return msgspec.UNSET
    return Speculation(
        drafted=sum(one.drafted for one in told),
        accepted=sum(one.accepted for one in told),
        target_calls=sum(one.target_calls for one in told),
    )


def usage_body(rows: Iterable[Usage], choices: int | None = None) -> UsageBody:
    """The usage of a request from those of its rows, one or more. choices: how many rows each prompt has, one
    after the other, None for all; a prompt counts once, as its first row saw it."""
    counts = list(rows)
    firsts = counts[:: choices or len(counts)]
    prompt = sum(row.prompt_tokens for row in firsts)
    completion = sum(row.completion_tokens for row in counts)
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(sum(row.cached_tokens for row in firsts)),
        lane=counts[0].lane,
        speculation=speculation_of(counts),
    )
