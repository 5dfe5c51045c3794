"""Reader of chat's `messages`: OpenAI's wire format, and what clients make of it, as `ChatMessage`s.

Clients send back what a server gave them, so an assistant's message may carry any field of an answer; those
that say nothing pass, those that would be lost are refused. Histories are cut by clients: a `tool` message
whose call is no longer there is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from mlxpool.shared.api import parts, read
from mlxpool.shared.api.messages import ChatMessage, MadeCall
from mlxpool.shared.api.table import is_off

_Role = Literal["system", "user", "assistant", "tool"]
_ROLES: dict[str, _Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# cache_control: where a hosted cache would cut; prefixes are found by their tokens here.
_EVERY_FIELDS = ("role", "content", "name", "cache_control")
_OWN_FIELDS: dict[_Role, tuple[str, ...]] = {
    "system": (),
    "user": (),
    "assistant": ("tool_calls", "reasoning", "reasoning_content"),
    "tool": ("tool_call_id",),
}
# Fields of some role, or of answers, with the values besides null that say nothing in any message.
_OFF: dict[str, tuple[object, ...]] = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "function_call": (),
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
}
_INSTEAD = {
    "function_call": "send tool_calls instead",
    "refusal": "send its text as content",
    "annotations": "leave it out",
    "audio": "this model reads text only; send the transcript as content",
}
_KNOWN = (*_EVERY_FIELDS, *_OFF)


def read_messages(value: object) -> tuple[ChatMessage, ...]:
    """The body's `messages`. Raises ApiError 400 naming the message, its field and what would work."""
    if value is None:
        raise read.invalid("messages", "messages is missing; it must be a non-empty list of messages")
    if not isinstance(value, list) or not value:
        raise read.invalid(
            "messages", f"messages must be a non-empty list of messages, not {read.quoted(value)}"
        )
    return tuple(_message(f"messages[{place}]", message) for place, message in enumerate(value))


def _message(where: str, value: object) -> ChatMessage:
    message = read.mapping(where, value, '{"role": "user", "content": "…"}')
    role = _role(f"{where}.role", message.get("role"))
    _check_fields(where, role, message)
    reasoning = _reasoning(where, message) if role == "assistant" else None
    calls = _calls(f"{where}.tool_calls", message.get("tool_calls")) if role == "assistant" else ()
    content = message.get("content")
    may_be_empty = bool(calls) or reasoning is not None
    return ChatMessage(
        role,
        None if content is None and may_be_empty else parts.joined(f"{where}.content", content, _part),
        read.string(f"{where}.name", message.get("name")),
        reasoning,
        calls,
        read.filled(f"{where}.tool_call_id", message.get("tool_call_id")) if role == "tool" else None,
    )


def _role(where: str, value: object) -> _Role:
    if value == "function":
        raise read.unsupported(
            where, f'{where}: role "function" is not supported; send role "tool" with a tool_call_id'
        )
    return _ROLES[read.name_of(where, value, tuple(_ROLES))]


def _check_fields(where: str, role: _Role, message: Mapping[str, Any]) -> None:
    read.only(where, message, _KNOWN)
    for name, off in _OFF.items():
        value = message.get(name)
        if name in _OWN_FIELDS[role] or is_off(value, off):
            continue
        if name in _INSTEAD:
            raise read.unsupported(
                f"{where}.{name}",
                f"{where}.{name}: {read.quoted(value)} is not supported; {_INSTEAD[name]}",
            )
        owner = next(owner for owner, names in _OWN_FIELDS.items() if name in names)
        raise read.invalid(
            f"{where}.{name}", f'{where}.{name} belongs to role "{owner}" only, not to "{role}"; leave it out'
        )
    parts.check_cache_control(where, message)


def _reasoning(where: str, message: Mapping[str, Any]) -> str | None:
    """What the assistant thought, under either of its names; None where it is empty."""
    new = read.string(f"{where}.reasoning", message.get("reasoning"))
    old = read.string(f"{where}.reasoning_content", message.get("reasoning_content"))
    if new and old and new != old:
        raise read.invalid(
            f"{where}.reasoning",
            f"{where}.reasoning {read.quoted(new)} and {where}.reasoning_content {read.quoted(old)} "
            "contradict each other; send one of them",
        )
    return new or old or None


def _part(where: str, value: object) -> str:
    part = read.mapping(where, value, '{"type": "text", "text": "…"}')
    kind = part.get("type")
    if kind != "text":
        raise parts.no_such_part(where, kind)
    text = read.text(f"{where}.text", part.get("text"))
    read.only(where, part, ("type", "text", "cache_control"))
    parts.check_cache_control(where, part)
    return text


def _calls(where: str, value: object) -> tuple[MadeCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise read.invalid(where, f"{where} must be a list of calls, not {read.quoted(value)}")
    return tuple(_call(f"{where}[{place}]", call) for place, call in enumerate(value))


def _call(where: str, value: object) -> MadeCall:
    call = read.mapping(
        where, value, '{"id": "…", "type": "function", "function": {"name": "…", "arguments": "{}"}}'
    )
    kind = call.get("type", "function")
    if kind != "function":
        raise read.unsupported(
            f"{where}.type", f'{where}.type must be "function", not {read.quoted(kind)}: no other tool works'
        )
    # index: of a streamed call's pieces, kept by clients that put those together.
    read.only(where, call, ("id", "type", "function", "index"))
    inside = f"{where}.function"
    function = read.mapping(inside, call.get("function"), '{"name": "…", "arguments": "{}"}')
    read.only(inside, function, ("name", "arguments"))
    return MadeCall(
        read.filled(f"{where}.id", call.get("id")),
        read.filled(f"{inside}.name", function.get("name")),
        read_arguments(f"{inside}.arguments", function.get("arguments")),
    )


def read_arguments(where: str, value: object) -> dict[str, Any] | str:
    """An object, also where it came as JSON text; text that holds none stays text, because a model may have
    written it and has to see what it did."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    if not isinstance(value, str):
        raise read.invalid(where, f'{where} must be JSON text like "{{}}", not {read.quoted(value)}')
    if not value.strip():
        return {}
    try:
        held = msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError):
        return value
    return held if isinstance(held, dict) and read.is_shallow(held) else value
