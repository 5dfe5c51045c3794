"""Every event of the streams of `/v1/responses`, through the official client and off the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.clients.answers import CACHED, CITY, COMPLETION, FAILED, PROMPT
from tests.clients.exact import named, raw, typed
from tests.tools.served import Served

TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": CITY, "strict": False},
    {"type": "custom", "name": "shell"},
    {
        "type": "namespace",
        "name": "files",
        "description": "What lies in folders",
        "tools": [{"type": "function", "name": "read", "parameters": CITY}],
    },
]
# What is asked of each model, here and by Node's client (test_node_exact.py).
ASKED: dict[str, Any] = {"input": "hello", "tools": TOOLS}

USAGE = {
    "input_tokens": PROMPT,
    "input_tokens_details": {"cached_tokens": CACHED, "cache_write_tokens": 0},
    "output_tokens": COMPLETION,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": PROMPT + COMPLETION,
    "prompt_tokens": PROMPT,
    "completion_tokens": COMPLETION,
    "prompt_tokens_details": {"cached_tokens": CACHED},
    "lane": "batch",
}

Events = list[dict[str, Any]]


def response(model: str, status: str, output: Events, **more: Any) -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 0,
        "completed_at": 0 if status == "completed" else None,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "prompt_cache_retention": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": TOOLS,
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        "metadata": {},
        **more,
    }


def item_of(index: int, empty: dict[str, Any], middle: Events, full: dict[str, Any]) -> Events:
    place = {"output_index": index}
    return [
        {"type": "response.output_item.added", **place, "item": {**empty, "status": "in_progress"}},
        *({**event, "item_id": empty["id"], **place} for event in middle),
        {"type": "response.output_item.done", **place, "item": full},
    ]


def message(index: int, *pieces: str, status: str = "completed") -> Events:
    whole = "".join(pieces)

    def part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}

    at: dict[str, Any] = {"content_index": 0}
    bare = {"id": "msg_1", "type": "message", "role": "assistant"}
    middle = [
        {"type": "response.content_part.added", **at, "part": part("")},
        *({"type": "response.output_text.delta", **at, "delta": piece, "logprobs": []} for piece in pieces),
        {"type": "response.output_text.done", **at, "text": whole, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part(whole)},
    ]
    full = {**bare, "status": status, "content": [part(whole)]}
    return item_of(index, {**bare, "content": []}, middle, full)


def reasoning(index: int, *pieces: str) -> Events:
    whole = "".join(pieces)
    at: dict[str, Any] = {"content_index": 0}
    bare = {"id": "rs_1", "type": "reasoning", "summary": []}
    middle = [
        {"type": "response.content_part.added", **at, "part": {"type": "reasoning_text", "text": ""}},
        *({"type": "response.reasoning_text.delta", **at, "delta": piece} for piece in pieces),
        {"type": "response.reasoning_text.done", **at, "text": whole},
        {"type": "response.content_part.done", **at, "part": {"type": "reasoning_text", "text": whole}},
    ]
    content = [{"type": "reasoning_text", "text": whole}]
    return item_of(
        index, {**bare, "content": []}, middle, {**bare, "status": "completed", "content": content}
    )


def call(index: int, item_id: str, call_id: str, *pieces: str, **named_as: str) -> Events:
    whole = "".join(pieces)
    bare = {"id": item_id, "type": "function_call", "call_id": call_id, **(named_as or {"name": "weather"})}
    middle = [
        *({"type": "response.function_call_arguments.delta", "delta": piece} for piece in pieces),
        {"type": "response.function_call_arguments.done", "arguments": whole},
    ]
    return item_of(
        index, {**bare, "arguments": ""}, middle, {**bare, "arguments": whole, "status": "completed"}
    )


def custom_call(index: int, *pieces: str) -> Events:
    whole = "".join(pieces)
    bare = {"id": "ctc_1", "type": "custom_tool_call", "call_id": "call_a", "name": "shell"}
    middle = [
        *({"type": "response.custom_tool_call_input.delta", "delta": piece} for piece in pieces),
        {"type": "response.custom_tool_call_input.done", "input": whole},
    ]
    return item_of(index, {**bare, "input": ""}, middle, {**bare, "input": whole, "status": "completed"})


# Model → the items' events.
CASES: dict[str, Callable[[], Events]] = {
    "text": lambda: message(0, "Hello", ", wörld"),
    "reasoning": lambda: [*reasoning(0, "Two and", " two."), *message(1, "Fo", "ur")],
    "calls": lambda: [
        *message(0, "Let me see."),
        *call(1, "fc_1", "call_a", '{"city":', ' "Oslo"}'),
        *call(2, "fc_2", "call_b", '{"city": "Rome"}'),
    ],
    "custom": lambda: custom_call(0, 'ls "a', ' b"'),
    "namespaced": lambda: call(0, "fc_1", "call_a", '{"city": "Oslo"}', name="read", namespace="files"),
    "stop": lambda: message(0, "One,", " two,"),
    "length": lambda: message(0, "The capital", " of", status="incomplete"),
    "failure": lambda: message(0, "Half a", status="incomplete"),
}

# How the last event tells the end; what isn't here has completed.
ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "length": ("incomplete", {"incomplete_details": {"reason": "max_output_tokens"}, "usage": USAGE}),
    "failure": (
        "failed",
        {"error": {"code": "server_error", "message": FAILED, "param": None, "type": "internal_error"}},
    ),
}


def final(model: str) -> dict[str, Any]:
    output = [event["item"] for event in CASES[model]() if event["type"] == "response.output_item.done"]
    status, more = ENDS.get(model, ("completed", {"usage": USAGE}))
    return response(model, status, output, **more)


def every_event(model: str) -> Events:
    begun = response(model, "in_progress", [])
    last = final(model)
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *CASES[model](),
        {"type": f"response.{last['status']}", "response": last},
    ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


@pytest.mark.parametrize("model", CASES)
def test_every_event_of_a_response(scripted: Served, scripted_gpt: openai.OpenAI, model: str) -> None:
    body: Any = {"model": model, **ASKED}
    expected = every_event(model)
    assert typed(scripted_gpt.responses.create(**body, stream=True)) == expected
    assert named(raw(scripted, "/v1/responses", body)) == expected


@pytest.mark.parametrize("model", [model for model in CASES if model != "failure"])
def test_a_whole_response_is_the_last_event_of_the_streamed_one(
    scripted_gpt: openai.OpenAI, model: str
) -> None:
    made = scripted_gpt.responses.create(model=model, **ASKED)
    assert named([made.model_dump(mode="json", exclude_unset=True)]) == [final(model)]


def test_a_whole_response_that_fails_is_an_error(scripted_gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match=FAILED):
        scripted_gpt.responses.create(model="failure", input="hello")


@pytest.mark.parametrize("model", CASES)
def test_what_is_kept_replays_the_same_events(scripted_gpt: openai.OpenAI, model: str) -> None:
    first, *_ = scripted_gpt.responses.create(model=model, input="hello", tools=TOOLS, stream=True)
    assert first.type == "response.created"
    kept = scripted_gpt.responses.retrieve(first.response.id, stream=True)
    assert typed(kept) == every_event(model)
