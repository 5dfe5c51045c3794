"""Token counts in OpenAI's shape, the same for every protocol that has it, streamed or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from mlxpool.worker.text.events import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """`usage`. lane: how the request ran, see `events.Usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    lane: Literal["batch", "turns"]


def usage_body(rows: Iterable[Usage]) -> UsageBody:
    """The usage of a request from those of its rows, one or more: their one prompt counts once."""
    counts = list(rows)
    prompt = counts[0].prompt_tokens
    completion = sum(row.completion_tokens for row in counts)
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(counts[0].cached_tokens),
        lane=counts[0].lane,
    )
