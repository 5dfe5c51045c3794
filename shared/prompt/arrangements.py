"""A conversation in the ways that chat templates take it, the truest first. Pure.

Every template has rules of its own about who may speak when, and refuses what breaks them: a system message
further on, two messages of one role beside each other, arguments of a call that are no object. Agents send
all of these, and a conversation that was refused once would be refused for ever. So what a template refuses
is shown to it again with less of it as it stands: nothing that was said is left out, and a call keeps its
result. Each is made only when the one before was refused. What is the client's own and stands first (its
system message, for a model that takes none) is not moved: that refusal is the client's to hear.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any

Messages = list[dict[str, Any]]

# The one argument that stands for arguments which a limit cut, or which were never an object.
_UNREADABLE = "_"
_BETWEEN = "\n\n"


def arrangements(messages: Sequence[dict[str, Any]], text: str) -> Iterator[Messages]:
    """The messages with `text` told to the model; as it stands first. text: "" for nothing to tell."""
    unreadable = any(map(_has_unreadable_call, messages))
    tried: list[Messages] = []
    for arranged in _orders(messages, text):
        for found in (arranged, list(map(_with_readable_calls, arranged))) if unreadable else (arranged,):
            if found not in tried:
                tried.append(found)
                yield found


def _orders(messages: Sequence[dict[str, Any]], text: str) -> Iterator[Messages]:
    yield with_system_text(messages, text)
    yield with_system_text(_in_turns(messages), text)
    late = _system_first(messages)
    yield with_system_text(late, text)
    turns = _in_turns(late)
    yield with_system_text(turns, text)
    yield _in_turns(_with_user_text(turns, text))


def with_system_text(messages: Sequence[dict[str, Any]], text: str) -> Messages:
    """`text` at the end of the first message, where that is a system message, else in one of its own."""
    if not text:
        return list(messages)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip("\n")}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_user_text(messages: Sequence[dict[str, Any]], text: str) -> Messages:
    """`text` before the first user's message, or in one of its own where there is none."""
    if not text:
        return list(messages)
    for place, message in enumerate(messages):
        if message["role"] == "user":
            first = {**message, "content": f"{text}\n\n{message['content']}"}
            return [*messages[:place], first, *messages[place + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _system_first(messages: Sequence[dict[str, Any]]) -> Messages:
    """One system message at the head, made of all that stand there; later ones are a user's."""
    head = list(takewhile(lambda message: message["role"] == "system", messages))
    later = [
        {"role": "user", "content": message["content"]} if message["role"] == "system" else message
        for message in messages[len(head) :]
    ]
    return [{**head[0], "content": _joined(head, "content")}, *later] if head else later


def _in_turns(messages: Sequence[dict[str, Any]]) -> Messages:
    """Neighbouring messages of one user or assistant as one. Results of tools stay apart: each is of a call
    of its own."""
    turns: Messages = []
    for role, neighbours in groupby(messages, lambda message: message["role"]):
        beside = list(neighbours)
        if len(beside) > 1 and role in ("user", "assistant"):
            turns.append(_as_one(beside))
        else:
            turns += beside
    return turns


def _as_one(messages: Messages) -> dict[str, Any]:
    one = {**messages[0], "content": _joined(messages, "content")}
    reasoning = _joined(messages, "reasoning_content")
    if reasoning:
        one["reasoning_content"] = reasoning
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if calls:
        one["tool_calls"] = calls
    return one


def _joined(messages: Messages, field: str) -> str:
    return _BETWEEN.join(filter(None, (message.get(field) for message in messages)))


def _has_unreadable_call(message: dict[str, Any]) -> bool:
    return any(isinstance(call["function"]["arguments"], str) for call in message.get("tool_calls", ()))


def _with_readable_calls(message: dict[str, Any]) -> dict[str, Any]:
    """Text that is no object as the one argument of an object, for templates that go through arguments."""
    if not _has_unreadable_call(message):
        return message
    return {**message, "tool_calls": [_readable(call) for call in message["tool_calls"]]}


def _readable(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": {_UNREADABLE: function["arguments"]}}}
