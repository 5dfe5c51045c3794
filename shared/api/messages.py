"""Messages of a chat, normalised: what a template reads, whatever the wire wrote."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class MadeCall(msgspec.Struct, frozen=True):
    """A call that an assistant's message of the history made. arguments: an object, also where the client
    sent its JSON text; text that is no object stays text."""

    id: str
    name: str
    arguments: dict[str, Any] | str


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. content is text, None for an assistant's that only called functions. tool_call_id: the
    call that a `tool` message answers."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[MadeCall, ...] = ()
    tool_call_id: str | None = None
