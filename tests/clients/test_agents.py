"""Bodies as coding agents send them, with every field and kind of item that Codex and Claude Code use, on a
running server with the starter model: each turn of a loop with tools is answered."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.clients.conftest import ANSWER_TIMEOUT_S, STARTER
from tests.tools import sse
from tests.tools.served import Served

pytestmark = pytest.mark.starter

COMMAND = {
    "type": "object",
    "properties": {"cmd": {"type": "string", "description": "What to run"}},
    "required": ["cmd"],
    "additionalProperties": False,
}


def post(served: Served, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return httpx2.post(served.url + path, json=body, headers=headers, timeout=ANSWER_TIMEOUT_S)


def text_item(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def codex(*more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "model": STARTER,
        "stream": True,
        "store": False,
        "instructions": "You work in a terminal.",
        "input": [
            text_item("developer", "The sandbox is read-only."),
            text_item("user", "<environment>/tmp</environment>"),
            text_item("user", "List the files."),
            *more,
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "strict": False, "parameters": COMMAND},
            {"type": "custom", "name": "apply_patch", "description": "Changes files"},
            {
                "type": "namespace",
                "name": "agents",
                "description": "Helpers",
                "tools": [
                    {
                        "type": "function",
                        "name": "spawn",
                        "parameters": {"type": "object", "properties": {}},
                    }
                ],
            },
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "prompt_cache_key": "a-session",
        "client_metadata": {"session": "1"},
        "max_output_tokens": 8,
        "temperature": 0,
        **fields,
    }


def last_response(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    events = [event.json() for event in sse.read(answer.content, whole=False)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return dict(events[-1]["response"])


def test_codex_goes_round_with_its_tools(starter: Served) -> None:
    first = post(starter, "/v1/responses", codex())
    begun = last_response(first)
    assert begun["status"] in ("completed", "incomplete")
    assert begun["store"] is False
    assert [tool["type"] for tool in begun["tools"]] == ["function", "custom", "namespace", "web_search"]

    reasoning = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "A listing is wanted."}],
        "encrypted_content": "made by somebody else",
    }
    said = {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
    }
    calls = [
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "call_2"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        {
            "type": "function_call",
            "namespace": "agents",
            "name": "spawn",
            "arguments": "{}",
            "call_id": "call_3",
        },
        {
            "type": "function_call_output",
            "call_id": "call_3",
            "output": [{"type": "input_text", "text": "ok"}],
        },
    ]
    second = last_response(post(starter, "/v1/responses", codex(reasoning, said, *calls)))
    assert second["usage"]["input_tokens"] > begun["usage"]["input_tokens"]
    assert second["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_a_hosted_tool_that_is_left_out_is_said(starter: Served) -> None:
    answer = post(starter, "/v1/responses", codex(stream=False))
    assert "web_search" in answer.headers["warning"]


def claude_code(*more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    cached = {"type": "ephemeral"}
    return {
        "model": STARTER,
        "stream": True,
        "max_tokens": 8,
        "system": [
            {"type": "text", "text": "You work in a terminal."},
            {"type": "text", "text": "Be brief.", "cache_control": {**cached, "ttl": "1h"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<reminder>Today is Monday.</reminder>"},
                    {"type": "text", "text": "List the files.", "cache_control": cached},
                ],
            },
            {"role": "system", "content": "The folder is /tmp."},
            *more,
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command",
                "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **COMMAND},
                "cache_control": cached,
            },
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "a-device"},
        "temperature": 1,
        **fields,
    }


BETAS = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,context-management"}


def test_claude_code_goes_round_with_its_tools(starter: Served) -> None:
    assert httpx2.head(starter.url + "/").status_code == 200
    first = post(starter, "/v1/messages?beta=true", claude_code(), **BETAS)
    assert first.status_code == 200, first.text
    turns = [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A listing is wanted.", "signature": "somebody else's"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"cmd": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False},
                {"type": "text", "text": "(no content)", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    second = post(starter, "/v1/messages?beta=true", claude_code(*turns), **BETAS)
    assert second.status_code == 200, second.text
    kinds = [event.name for event in sse.read(second.content, whole=False)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

    counted = {
        name: value
        for name, value in claude_code(*turns).items()
        if name not in ("stream", "max_tokens", "metadata", "temperature")
    }
    count = post(starter, "/v1/messages/count_tokens?beta=true", counted, **BETAS)
    assert count.status_code == 200, count.text
    used = sse.read(second.content, whole=False)[0].json()["message"]["usage"]
    assert count.json()["input_tokens"] == used["prompt_tokens"]


def test_a_conversation_that_has_grown_too_long_is_refused_as_agents_need_it_to_compact(
    starter: Served,
) -> None:
    long = "far too long " * 5_000
    streamed = post(starter, "/v1/responses", codex(text_item("user", long), store=True))
    failed = last_response(streamed)
    kinds = [event.name for event in sse.read(streamed.content, whole=False)]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "context_length_exceeded")
    stored = httpx2.get(f"{starter.url}/v1/responses/{failed['id']}", timeout=ANSWER_TIMEOUT_S)
    assert stored.json() == failed
    refused = post(starter, "/v1/responses", codex(text_item("user", long), stream=False))
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = post(starter, "/v1/messages", claude_code({"role": "user", "content": long}), **BETAS)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")
