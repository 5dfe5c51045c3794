"""Messages of any protocol as chat templates read them. Pure.

Templates are written for the dicts of Hugging Face. Two things are made good on the way: a tool's result
gets the name of the function that it answers, which some families print and clients leave out, and a header
that changes with every request goes from the head of the first system text, because everything after it
would be a new prefix each time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mlxpool.shared.api.messages import ChatMessage, MadeCall

# What clients put at the head of the system text and change with every request: pattern, and who. Each ends
# with its line, or where a part joined without a newline begins.
_VOLATILE = (
    # Claude Code and its SDK: a version whose end and a hash that are drawn from the request itself.
    re.compile(r"x-anthropic-billing-header:(?:[ \t]*[\w-]+=[^;\r\n]*;)+[ \t]*(?:\r?\n)*"),
    # Agents that tell the model how much of its context or budget is used.
    re.compile(r"Token usage: [\d,]+/[\d,]+(?:; [\d,]+ remaining)?;?[ \t]*(?:(?:\r?\n)+|\Z)"),
    re.compile(r"USD budget: \$[\d.,]+/\$[\d.,]+(?:; \$[\d.,]+ remaining)?;?[ \t]*(?:(?:\r?\n)+|\Z)"),
)


def strip_volatile(text: str) -> str:
    """`text` without the known volatile lines at its very beginning; anything else, and what is further on,
    stays as it is."""
    start = 0
    while match := next((match for line in _VOLATILE if (match := line.match(text, start))), None):
        start = match.end()
    return text[start:]


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as dicts of role, content ("" where there is none) and, where given, name,
    reasoning_content, tool_calls (arguments as an object where they are one) and tool_call_id."""
    names: dict[str, str] = {}
    rendered = []
    for message in _without_volatile_head(messages):
        rendered.append(_template_message(message, names))
        names.update((call.id, call.name) for call in message.tool_calls)
    return rendered


def _without_volatile_head(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """A header may be a system message of its own: that one goes altogether, and the next is the head."""
    for place, message in enumerate(messages):
        if message.role != "system" or not message.content:
            return messages[place:]
        text = strip_volatile(message.content)
        if text or place + 1 == len(messages):
            return [_with_content(message, text), *messages[place + 1 :]]
    return messages


def _with_content(message: ChatMessage, text: str) -> ChatMessage:
    return ChatMessage(message.role, text, message.name)


def _template_message(message: ChatMessage, names: dict[str, str]) -> dict[str, Any]:
    given: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    name = message.name
    if message.tool_call_id is not None:
        given["tool_call_id"] = message.tool_call_id
        name = name or names.get(message.tool_call_id)
    if name is not None:
        given["name"] = name
    if message.reasoning is not None:
        given["reasoning_content"] = message.reasoning
    if message.tool_calls:
        given["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return given


def _template_call(call: MadeCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
