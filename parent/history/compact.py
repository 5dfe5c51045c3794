"""`POST /v1/responses/compact`: a conversation made short by the model that had it.

The model is asked, as the conversation's next turn, to sum it up; what it says goes into a `compaction`
item, which stands for everything before it in the next request. The user's own last words are kept beside it
as they were: they are what a summary must not get wrong. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxpool.shared.api import read
from mlxpool.shared.api.response_object import compaction
from mlxpool.shared.errors import error

from .input_items import listed

# About five thousand tokens.
KEPT_CHARS = 20_000
# Of a summary whose request says no max_output_tokens: a model that repeats itself would fill its context.
MAX_TOKENS = 4096

INSTRUCTION = (
    "Summarise the conversation so far for yourself: it will be taken away, and you will go on from your"
    " summary alone. State what the user wants, what has been done and decided and why, facts, names, paths"
    " and values that are still needed, and what is to be done next. Write the summary and nothing else."
)

# What a summary is asked with, and what says nothing to one: clients send the fields of their last request.
_PASSED_ON = ("model", "instructions", "reasoning", "prompt_cache_key", "keep_alive", "max_output_tokens")
_OF_NO_EFFECT = (
    "input",
    "previous_response_id",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "text",
    "include",
    "store",
    "metadata",
    "service_tier",
    "prompt_cache_retention",
    "user",
    "safety_identifier",
)
KNOWN = (*_PASSED_ON, *_OF_NO_EFFECT)


def check(raws: Mapping[str, msgspec.Raw]) -> None:
    """Raises ApiError 400 for a field that a compaction does not have."""
    for name in raws:
        if name not in KNOWN:
            raise read.unknown_field(name, KNOWN)


def question(raws: Mapping[str, msgspec.Raw], given: bytes | None) -> bytes:
    """The body that asks for the summary of a conversation. Raises ApiError 400 where there is none."""
    inner = b"" if given is None else given.strip()[1:-1].strip()
    if not inner:
        raise read.invalid("input", "there is nothing to compact; send input, previous_response_id or both")
    turn = msgspec.json.encode({"type": "message", "role": "user", "content": INSTRUCTION})
    body = {name: raws[name] for name in _PASSED_ON if name in raws}
    if bytes(body.get("max_output_tokens", msgspec.Raw(b"null"))) == b"null":
        body["max_output_tokens"] = msgspec.Raw(b"%d" % MAX_TOKENS)
    body["input"] = msgspec.Raw(b"[%b,%b]" % (inner, turn))
    body["store"] = msgspec.Raw(b"false")
    return msgspec.json.encode(body)


class _Answer(msgspec.Struct):
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    created_at: int
    status: str
    max_output_tokens: int | None = None


def compacted(answer: bytes, given: bytes, new_id: str, item_id: str) -> dict[str, Any]:
    """The compaction. answer: the response that holds the summary. given: the conversation, a JSON list.
    Raises ApiError 400 for a summary that was cut, and 500 where the model said nothing."""
    told = msgspec.json.decode(answer, type=_Answer)
    if told.status != "completed":
        limit = told.max_output_tokens or MAX_TOKENS
        raise read.invalid(
            "max_output_tokens",
            f"the summary was cut: it did not end within max_output_tokens ({limit}), or the model's context;"
            " the conversation is as it was. Raise max_output_tokens, or compact a shorter one",
        )
    summary = "".join(
        part["text"]
        for item in told.output
        if item.get("type") == "message"
        for part in item["content"]
        if part.get("type") == "output_text"
    ).strip()
    if not summary:
        raise error("internal_error", "the model wrote no summary; the conversation is as it was")
    return {
        "id": new_id,
        "object": "response.compaction",
        "created_at": told.created_at,
        "output": [*_kept(given), compaction(item_id, summary)],
        "usage": told.usage,
    }


def _kept(given: bytes) -> list[dict[str, Any]]:
    """The user's last messages, in order, as far back as there is room."""
    kept: list[dict[str, Any]] = []
    room = KEPT_CHARS
    for item in reversed(listed(given)):
        if item["type"] != "message" or item.get("role") != "user":
            continue
        room -= _length(item)
        if room < 0:
            break
        kept.append(item)
    return kept[::-1]


def _length(item: Mapping[str, Any]) -> int:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    return sum(len(part.get("text") or "") for part in parts if isinstance(part, dict))
