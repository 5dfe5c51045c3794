"""Ids of calls as Mistral's templates want them: nine letters and digits, or the template refuses. Pure.

A history may have been made with another model, whose ids are longer. Each is mapped to one of nine
characters that depends on it alone, so that a call and its result still belong together and the prompt is
the same in every turn.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

FAMILY = "mistral"
_CHARS = 9
_FITS = re.compile(rf"[a-zA-Z0-9]{{{_CHARS}}}")


def shortened(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a template, with every id of a call in that form."""
    return [_with_short_ids(message) for message in messages]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if "tool_call_id" in changed:
        changed["tool_call_id"] = _short(changed["tool_call_id"])
    if "tool_calls" in changed:
        changed["tool_calls"] = [{**call, "id": _short(call["id"])} for call in changed["tool_calls"]]
    return changed


def _short(call_id: str) -> str:
    if _FITS.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()[:_CHARS]
