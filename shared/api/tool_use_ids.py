"""Ids of calls as Anthropic's clients know them, and back. Pure.

The protocol's ids begin with `toolu_` and hold letters, digits, _ and - alone; models write their own
(`functions.get:0`, nine characters), and their templates print them. So what a client sends back has to
become the very id that the model wrote, or the prompt differs from the one that is cached. Most ids are this
server's (`call_…`) and stay readable; any other goes as base64 behind a mark.
"""

from __future__ import annotations

import base64
import binascii
import re

_OURS = "call_"
_THEIRS = "toolu_"
_MARK = "mlxpool_"
_PLAIN = re.compile(r"[a-zA-Z0-9_-]+")


def encode(call_id: str) -> str:
    """The id that a client is told. Each call id has its own, always the same."""
    rest = call_id.removeprefix(_OURS)
    if rest != call_id and _PLAIN.fullmatch(rest) and not rest.startswith(_MARK):
        return f"{_THEIRS}{rest}"
    return f"{_THEIRS}{_MARK}{base64.urlsafe_b64encode(call_id.encode()).decode().rstrip('=')}"


def decode(tool_use_id: str) -> str:
    """The call id that `encode` was given; an id that it didn't make is as good as any, and stays one that no
    other becomes."""
    rest = tool_use_id.removeprefix(_THEIRS)
    if rest == tool_use_id or not _PLAIN.fullmatch(rest):
        return tool_use_id
    call_id = f"{_OURS}{rest}"
    if rest.startswith(_MARK):
        text = rest.removeprefix(_MARK)
        try:
            call_id = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
        except (binascii.Error, ValueError):
            return tool_use_id
    return call_id if call_id and encode(call_id) == tool_use_id else tool_use_id
