"""Ids of calls that Mistral's templates accept."""

from __future__ import annotations

import re

from mlxpool.shared.prompt.call_ids import shortened


def test_a_call_and_its_result_keep_belonging_together_under_nine_characters() -> None:
    history = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0123456789abcdef", "function": {}}]},
        {"role": "tool", "content": "x", "tool_call_id": "call_0123456789abcdef"},
    ]
    calls, result = shortened(history)
    assert re.fullmatch("[a-zA-Z0-9]{9}", result["tool_call_id"])
    assert calls["tool_calls"][0]["id"] == result["tool_call_id"]
    assert shortened(history) == [calls, result]
    assert history[1]["tool_call_id"] == "call_0123456789abcdef"


def test_ids_of_that_form_and_messages_without_any_stay() -> None:
    messages = [
        {"role": "tool", "content": "x", "tool_call_id": "aB3dE6gH9"},
        {"role": "user", "content": "y"},
    ]
    assert shortened(messages) == messages
    (other,) = shortened([{"role": "tool", "content": "x", "tool_call_id": "aB3dE6gH9x"}])
    assert other["tool_call_id"] != "aB3dE6gH9"
