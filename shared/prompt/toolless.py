"""Tools for a model whose chat template knows nothing of them. Pure.

The declared functions go into the system message with the form a call has, and a history of calls and
their results is written as text in that form: an assistant's calls inside its message, a result as a
user's message, because such a template refuses the role `tool`. The form is that of the family
`json_tools`, which more models have seen in training than any other.

Some templates have no system role, or want user and assistant to take turns. What is ours in the messages
must not be what they refuse: for them the text goes before the first user's, and neighbours become one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# The family that reads the answer, and that a forced call's grammar writes.
FAMILY = "json_tools"

_INSTRUCTION = """You may call functions to help with the user's request. Each line is a function's signature:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "function-name", "arguments": {{...}}}}
</tool_call>"""


def rewrite(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the roles that every template knows."""
    return [_without_calls(message) for message in messages]


def instruction(tools: Sequence[dict[str, Any]]) -> str:
    """What a model is told of these tools, given as the client wrote them."""
    return _INSTRUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def arrangements(messages: Sequence[dict[str, Any]], text: str) -> list[list[dict[str, Any]]]:
    """The messages with `text` told to the model, in the ways that templates take, the best first."""
    told = with_system_text(messages, text) if text else list(messages)
    return [told, _in_turns(_with_user_text(messages, text) if text else messages)]


def with_system_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """`text` at the end of the first message, where that is a system message, else in one of its own."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip("\n")}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_user_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """`text` before the first user's message, or in one of its own where there is none."""
    for place, message in enumerate(messages):
        if message["role"] == "user":
            first = {**message, "content": f"{text}\n\n{message['content']}"}
            return [*messages[:place], first, *messages[place + 1 :]]
    return [{"role": "user", "content": text}, *messages]


def _in_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring messages of one user or assistant as one."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if turns and message["role"] == turns[-1]["role"] != "system":
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n\n{message['content']}"}
        else:
            turns.append(message)
    return turns


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = message.get("tool_calls")
    if not calls:
        return message
    blocks = [
        "<tool_call>\n"
        + json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        + "\n</tool_call>"
        for call in calls
    ]
    content = "\n".join([*([message["content"]] if message["content"] else []), *blocks])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": content}
