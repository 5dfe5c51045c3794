"""`GET /v1/responses/{id}/input_items`: the input of a response, a page at a time.

Items have ids, so that a page can begin behind one. One that a client gave without, or with the id of an
earlier one, is named after what it says and where it stands: the same in every response of its conversation.
Pure.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from mlxpool.shared.api.read import invalid, quoted

Order = Literal["asc", "desc"]
DEFAULT_LIMIT, MAX_LIMIT = 20, 100

_lists = msgspec.json.Decoder(list[msgspec.Raw])
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}


def listed(given: bytes) -> list[dict[str, Any]]:
    """The items of a stored input, each with an id, and as answers write them."""
    seen: set[str] = set()
    return [_shown(bytes(raw), index, seen) for index, raw in enumerate(_lists.decode(given))]


def page(given: bytes, limit: int, order: Order, after: str | None) -> dict[str, Any]:
    """One page. after: the id of the item before its first. Raises ApiError 400 for an unknown one."""
    items = listed(given)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", f"after is {quoted(after)}, which is none of this response's input items")
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(items),
    }


def _shown(raw: bytes, index: int, seen: set[str]) -> dict[str, Any]:
    item = _decoded(raw)
    kind = item.setdefault("type", "message")
    if not isinstance(item.get("id"), str) or not item["id"] or item["id"] in seen:
        digest = hashlib.blake2b(b"%d:%b" % (index, raw), digest_size=12).hexdigest()
        item["id"] = f"{_PREFIXES.get(str(kind), 'item')}_{digest}"
    seen.add(item["id"])
    if item.get("status") is None:
        item["status"] = "completed"
    if kind == "message" and isinstance(item.get("content"), str):
        text = item["content"]
        item["content"] = [
            {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            if item.get("role") == "assistant"
            else {"type": "input_text", "text": text}
        ]
    if kind == "reasoning" and item.get("summary") is None:
        item["summary"] = []
    return item


def _decoded(raw: bytes) -> dict[str, Any]:
    """A request that was given up before a worker read it may hold anything."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"type": "invalid", "value": quoted(value)}
