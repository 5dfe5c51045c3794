"""Every event of the streams of `/v1/messages`, through the official client and off the wire."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.clients.answers import CACHED, CITY, COMPLETION, FAILED, PROMPT
from tests.clients.exact import hear, named, raw, typed
from tests.tools.served import Served

SIGNATURE = "bWx4cG9vbA=="
TOOLS: Any = [{"name": "weather", "input_schema": CITY}]
MESSAGES: Any = [{"role": "user", "content": "hello"}]
# What is asked of each model, here and by Node's client (test_node_exact.py).
ASKED: dict[str, Any] = {
    "max_tokens": 100,
    "messages": MESSAGES,
    "tools": TOOLS,
    "stop_sequences": [" three"],
}
ERROR = {"type": "api_error", "message": FAILED, "code": "internal_error"}


def usage(completion: int) -> dict[str, Any]:
    return {
        "input_tokens": PROMPT - CACHED,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": CACHED,
        "output_tokens": completion,
        "prompt_tokens": PROMPT,
        "completion_tokens": completion,
        "total_tokens": PROMPT + completion,
        "prompt_tokens_details": {"cached_tokens": CACHED},
        "lane": "batch",
    }


def message(model: str, content: list[Any], reason: str | None, stop: str | None, completion: int) -> Any:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage(completion),
    }


def block(index: int, empty: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": empty},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def text(index: int, *pieces: str) -> list[dict[str, Any]]:
    return block(
        index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": piece} for piece in pieces)
    )


def thinking(index: int, *pieces: str) -> list[dict[str, Any]]:
    return block(
        index,
        {"type": "thinking", "thinking": "", "signature": ""},
        *({"type": "thinking_delta", "thinking": piece} for piece in pieces),
        {"type": "signature_delta", "signature": SIGNATURE},
    )


def call(index: int, call_id: str, *pieces: str) -> list[dict[str, Any]]:
    return block(
        index,
        {"type": "tool_use", "id": call_id, "name": "weather", "input": {}},
        *({"type": "input_json_delta", "partial_json": piece} for piece in pieces),
    )


def used(call_id: str, city: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": {"city": city}}


# Model → the blocks' events, the reason with its stop sequence, and the whole content.
CASES: dict[str, tuple[list[dict[str, Any]], tuple[str, str | None], list[dict[str, Any]]]] = {
    "text": (
        text(0, "Hello", ", wörld"),
        ("end_turn", None),
        [{"type": "text", "text": "Hello, wörld"}],
    ),
    "reasoning": (
        [*thinking(0, "Two and", " two."), *text(1, "Fo", "ur")],
        ("end_turn", None),
        [
            {"type": "thinking", "thinking": "Two and two.", "signature": SIGNATURE},
            {"type": "text", "text": "Four"},
        ],
    ),
    "calls": (
        [
            *text(0, "Let me see."),
            *call(1, "toolu_a", '{"city":', ' "Oslo"}'),
            *call(2, "toolu_b", '{"city": "Rome"}'),
        ],
        ("tool_use", None),
        [{"type": "text", "text": "Let me see."}, used("toolu_a", "Oslo"), used("toolu_b", "Rome")],
    ),
    "stop": (
        text(0, "One,", " two,"),
        ("stop_sequence", " three"),
        [{"type": "text", "text": "One, two,"}],
    ),
    "length": (
        text(0, "The capital", " of"),
        ("max_tokens", None),
        [{"type": "text", "text": "The capital of"}],
    ),
}


def every_event(model: str) -> list[dict[str, Any]]:
    blocks, (reason, stop), _ = CASES[model]
    return [
        {"type": "message_start", "message": message(model, [], None, None, 0)},
        *blocks,
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": usage(COMPLETION),
        },
        {"type": "message_stop"},
    ]


def final(model: str) -> Any:
    _, (reason, stop), content = CASES[model]
    return message(model, content, reason, stop, COMPLETION)


@pytest.mark.parametrize("model", CASES)
def test_every_event_of_a_message(scripted: Served, scripted_claude: anthropic.Anthropic, model: str) -> None:
    _, (reason, _), content = CASES[model]
    expected = every_event(model)
    body: Any = {"model": model, **ASKED}
    assert typed(scripted_claude.messages.create(**body, stream=True)) == expected
    assert named(raw(scripted, "/v1/messages", body)) == expected
    whole = scripted_claude.messages.create(**body)
    assert named([whole.model_dump(mode="json", exclude_unset=True)]) == [final(model)]
    with scripted_claude.messages.stream(**body) as stream:
        gathered = stream.get_final_message()
    assert gathered.stop_reason == reason
    assert [said.model_dump(exclude_unset=True, exclude_none=True) for said in gathered.content] == content


def test_a_message_that_fails_in_mid_stream_is_an_error_and_no_answer(
    scripted: Served, scripted_claude: anthropic.Anthropic
) -> None:
    body: Any = {"model": "failure", "max_tokens": 100, "messages": MESSAGES}
    heard: list[Any] = []
    with pytest.raises(anthropic.APIStatusError, match=FAILED):
        hear(scripted_claude.messages.create(**body, stream=True), heard)
    assert [event.type for event in heard] == ["message_start", "content_block_start", "content_block_delta"]
    (last,) = raw(scripted, "/v1/messages", body)[3:]
    assert (last["type"], last["error"]) == ("error", ERROR)
    with pytest.raises(anthropic.InternalServerError, match=FAILED):
        scripted_claude.messages.create(**body)
