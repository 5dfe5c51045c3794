"""The object of a response: what it says before anything was said, and how it says that something failed.

The parent and the worker make it of the same body, so that a stream which one opened and the other goes on
with shows one object. The parent makes it before anybody has checked the body: a value of a wrong type is
left out here, the worker refuses it. Pure.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from mlxpool.shared.errors import ApiError

# Text that a client hands back unread: not secret, only opaque, and of a version that can change.
_SEAL = "mlxpool1."

_RETENTIONS = ("in_memory", "24h")
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")

# Codes that clients act on; everything else is `server_error` or `invalid_prompt`. The vendor's own types do
# not have context_length_exceeded, but its server sends it, and agents compact the conversation on it alone.
_CODES = {
    "context_length_exceeded": "context_length_exceeded",
    "queue_full": "rate_limit_exceeded",
}


def new_response(
    fields: Mapping[str, Any],
    *,
    id: str,  # noqa: A002 - the protocol's own word
    created: int,
    model: str,
    previous: str | None = None,
    status: str = "in_progress",
) -> dict[str, Any]:
    """The whole object of a response that has said nothing yet, with the body's `fields` echoed.

    created: unix seconds. model: the name that was asked for. previous: the response it goes on from.
    Temperature and the like are null where the body gives none: only the worker knows what applies then.
    """
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": status,
        "background": fields.get("background") is True,
        "error": None,
        "incomplete_details": None,
        "instructions": _of(fields, "instructions", str, list),
        "max_output_tokens": _count(fields, "max_output_tokens"),
        "max_tool_calls": None,
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.get("parallel_tool_calls") is not False,
        "presence_penalty": _number(fields, "presence_penalty"),
        "frequency_penalty": _number(fields, "frequency_penalty"),
        "previous_response_id": previous,
        "prompt_cache_key": _of(fields, "prompt_cache_key", str),
        "prompt_cache_retention": _one_of(fields, "prompt_cache_retention", _RETENTIONS),
        "reasoning": _reasoning(_of(fields, "reasoning", dict) or {}),
        "safety_identifier": _of(fields, "safety_identifier", str),
        "service_tier": "default",
        "store": fields.get("store") is not False,
        "temperature": _number(fields, "temperature"),
        "text": _text(_of(fields, "text", dict) or {}),
        "tool_choice": _of(fields, "tool_choice", str, dict) or "auto",
        "tools": [_tool(tool) for tool in _of(fields, "tools", list) or [] if isinstance(tool, dict)],
        "top_logprobs": max(0, _count(fields, "top_logprobs") or 0),
        "top_p": _number(fields, "top_p"),
        "truncation": "disabled",
        "usage": None,
        "user": _of(fields, "user", str),
        "metadata": _of(fields, "metadata", dict) or {},
    }


def unsaid(response: Mapping[str, Any]) -> dict[str, Any]:
    """What `response` was before it said anything."""
    return {
        **response,
        "status": "in_progress",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def failure(err: ApiError) -> dict[str, Any]:
    """The `error` of a response that failed. code: one that the protocol's clients know; type: ours."""
    code = _CODES.get(err.code) or ("invalid_prompt" if err.status == 400 else "server_error")
    return {"code": code, "message": err.message, "param": err.param, "type": err.code}


def seal(text: str) -> str:
    """Text as the `encrypted_content` of an item: opaque, and ours to read again."""
    return _SEAL + base64.urlsafe_b64encode(text.encode()).decode()


def unseal(value: str) -> str | None:
    """The text that `seal` was given; None where somebody else made it, or it is damaged."""
    if not value.startswith(_SEAL):
        return None
    try:
        return base64.b64decode(value.removeprefix(_SEAL), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def compaction(item_id: str, summary: str) -> dict[str, Any]:
    """The item that stands for a conversation's past in the next request."""
    return {"id": item_id, "type": "compaction", "encrypted_content": seal(summary)}


def _of(fields: Mapping[str, Any], name: str, *types: type) -> Any:
    value = fields.get(name)
    return value if isinstance(value, types) else None


def _number(fields: Mapping[str, Any], name: str) -> Any:
    value = fields.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        return None
    return int(value)


def _one_of(fields: Mapping[str, Any], name: str, names: tuple[str, ...]) -> str | None:
    value = fields.get(name)
    return value if isinstance(value, str) and value in names else None


def _reasoning(given: Mapping[str, Any]) -> dict[str, Any]:
    summary = _one_of(given, "summary", SUMMARIES) or _one_of(given, "generate_summary", SUMMARIES)
    return {"effort": _of(given, "effort", str), "summary": summary}


def _text(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format": _format(_of(given, "format", dict) or {}),
        "verbosity": _one_of(given, "verbosity", VERBOSITIES) or "medium",
    }


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """As it was sent, with what the protocol's types want of a namespace."""
    if given.get("type") != "namespace":
        return given
    return {**given, "description": given.get("description") or ""}


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    """With a schema beside its type, also where the client wrote it as chat has it."""
    kind = _one_of(given, "type", ("json_object", "json_schema"))
    if kind != "json_schema":
        return {"type": kind or "text"}
    inner = _of(given, "json_schema", dict) or given
    return {
        "type": kind,
        "name": _of(inner, "name", str) or "answer",
        "description": _of(inner, "description", str),
        "schema": _of(inner, "schema", dict) or {},
        "strict": inner.get("strict") is True,
    }
