"""Tools and their history, written out for templates that know neither."""

from __future__ import annotations

import json
from typing import Any

from mlxpool.shared.prompt.arrangements import with_system_text
from mlxpool.shared.prompt.toolless import instruction, rewrite

TOOL = {"type": "function", "function": {"name": "get", "description": "Gets é.", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"x": "é"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_declared_tools_are_listed_whole_in_the_system_message() -> None:
    (system, asked) = with_system_text([user("hi")], instruction([TOOL]))
    assert asked == user("hi")
    assert system["role"] == "system"
    assert json.dumps(TOOL, ensure_ascii=False) in system["content"].splitlines()
    (mine, _) = with_system_text([{"role": "system", "content": "Be kind."}, user("hi")], instruction([TOOL]))
    assert mine["content"].startswith("Be kind.\n\nYou may call")


def test_a_request_without_tools_is_left_as_it_is() -> None:
    messages = [{"role": "system", "content": "x"}, user("hi"), {"role": "assistant", "content": "ho"}]
    assert rewrite(messages) == messages


def test_calls_and_results_of_the_history_become_text_of_roles_that_every_template_knows() -> None:
    history = [
        user("hi"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    written = rewrite(history)
    block = '<tool_call>\n{"name": "get", "arguments": {"x": "é"}}\n</tool_call>'
    assert written == [
        user("hi"),
        {"role": "assistant", "content": f"Let me see.\n{block}\n{block}"},
        user("<tool_response>\n42\n</tool_response>"),
        {"role": "assistant", "content": block},
    ]
    assert history[1]["tool_calls"] == [CALL, CALL]
