"""Tools for a model whose chat template knows nothing of them. Pure.

The declared functions go into the system message with the form a call has, and a history of calls and
their results is written as text in that form: an assistant's calls inside its message, a result as a
user's message, because such a template refuses the role `tool`. The form is that of the family
`json_tools`, which more models have seen in training than any other.
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
