"""Tools and their history, written out for templates that know neither."""

from __future__ import annotations

import json
from typing import Any

from mlxpool.shared.prompt.toolless import arrangements, instruction, rewrite, with_system_text

TOOL = {"type": "function", "function": {"name": "get", "description": "Gets é.", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": {"x": "é"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_declared_tools_are_listed_whole_in_the_system_message() -> None:
    (system, asked) = arrangements([user("hi")], instruction([TOOL]))[0]
    assert asked == user("hi")
    assert system["role"] == "system"
    assert json.dumps(TOOL, ensure_ascii=False) in system["content"].splitlines()
    (mine, _) = arrangements([{"role": "system", "content": "Be kind."}, user("hi")], instruction([TOOL]))[0]
    assert mine["content"].startswith("Be kind.\n\nYou may call")


def test_a_request_without_tools_is_left_as_it_is() -> None:
    messages = [{"role": "system", "content": "x"}, user("hi"), {"role": "assistant", "content": "ho"}]
    assert rewrite(messages) == messages
    assert arrangements(messages, "")[0] == messages


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


def test_text_for_the_system_goes_to_the_first_message_and_to_no_later_one() -> None:
    later = [user("hi"), {"role": "system", "content": "late"}]
    assert with_system_text(later, "Do.") == [{"role": "system", "content": "Do."}, *later]
    assert with_system_text([{"role": "system", "content": ""}], "Do.")[0]["content"] == "Do."


def test_for_templates_without_a_system_role_and_with_turns_the_text_is_the_users() -> None:
    messages = [user("a"), user("b"), {"role": "assistant", "content": "c"}, user("d"), user("e")]
    assert arrangements(messages, "Do.")[1] == [
        user("Do.\n\na\n\nb"), {"role": "assistant", "content": "c"}, user("d\n\ne"),
    ]  # fmt: skip
    assert arrangements([{"role": "assistant", "content": "c"}], "Do.")[1][0] == user("Do.")
