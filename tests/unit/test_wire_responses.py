"""The Responses writer: events to one object, or to its life as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mlxpool.shared.api.response_object import unseal
from mlxpool.shared.errors import ApiError, error
from mlxpool.worker.text.events import (
    Event,
    Failure,
    Finish,
    Logprobs,
    Prefilled,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from mlxpool.worker.wire.responses import ResponseAnswer
from tests.unit.responses_world import USED, called, likely, parsed, said, whole, writer

SPENT = {
    "input_tokens": 7,
    "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
    "output_tokens": 5,
    "output_tokens_details": {"reasoning_tokens": 3},
    "total_tokens": 12,
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
    "lane": "batch",
}


def streamed(answer: ResponseAnswer, events: Sequence[Event]) -> list[dict[str, Any]]:
    """The events of a whole stream, without their numbers, which must have no holes."""
    told = parsed(answer.opening() + answer.write(said(events)))
    assert [event.pop("sequence_number") for event in told] == list(range(len(told)))
    assert answer.ended
    return told


EMPTY = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1700000000,
    "completed_at": None,
    "status": "in_progress",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "presence_penalty": None,
    "frequency_penalty": None,
    "previous_response_id": "resp_0",
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "usage": None,
    "user": None,
    "metadata": {},
}
OPENED = [
    {"type": "response.created", "response": EMPTY},
    {"type": "response.in_progress", "response": EMPTY},
]


def completed(*output: Any) -> dict[str, Any]:
    done = {**EMPTY, "status": "completed", "completed_at": 1700000009, "usage": SPENT}
    return {"type": "response.completed", "response": {**done, "output": [*output]}}


def message(place: int, text: str, status: str = "completed", logprobs: Any = ()) -> dict[str, Any]:
    part = {"type": "output_text", "annotations": [], "logprobs": [*logprobs], "text": text}
    return {
        "id": f"msg_1000{place}", "type": "message", "status": status, "role": "assistant", "content": [part],
    }  # fmt: skip


def life_of_message(
    place: int, text: str, status: str = "completed", logprobs: Any = ()
) -> list[dict[str, Any]]:
    item = message(place, text, status, logprobs)
    at = {"item_id": item["id"], "output_index": place, "content_index": 0}
    blank = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
    added = {**item, "status": "in_progress", "content": []}
    return [
        {"type": "response.output_item.added", "output_index": place, "item": added},
        {"type": "response.content_part.added", **at, "part": blank},
        {"type": "response.output_text.delta", **at, "delta": text, "logprobs": [*logprobs]},
        {"type": "response.output_text.done", **at, "text": text, "logprobs": [*logprobs]},
        {"type": "response.content_part.done", **at, "part": item["content"][0]},
        {"type": "response.output_item.done", "output_index": place, "item": item},
    ]


def reasoning(place: int, text: str, status: str = "completed") -> dict[str, Any]:
    return {
        "id": f"rs_1000{place}", "type": "reasoning", "status": status, "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    }  # fmt: skip


def life_of_reasoning(place: int, text: str) -> list[dict[str, Any]]:
    item = reasoning(place, text)
    at = {"item_id": item["id"], "output_index": place, "content_index": 0}
    added = {**item, "status": "in_progress", "content": []}
    return [
        {"type": "response.output_item.added", "output_index": place, "item": added},
        {"type": "response.content_part.added", **at, "part": {"type": "reasoning_text", "text": ""}},
        {"type": "response.reasoning_text.delta", **at, "delta": text},
        {"type": "response.reasoning_text.done", **at, "text": text},
        {"type": "response.content_part.done", **at, "part": {"type": "reasoning_text", "text": text}},
        {"type": "response.output_item.done", "output_index": place, "item": item},
    ]


def call(place: int, name: str, text: str, status: str = "completed", **more: Any) -> dict[str, Any]:
    return {
        "id": f"fc_1000{place}", "type": "function_call", "status": status, "call_id": f"call_{place}",
        "name": name, "arguments": text, **more,
    }  # fmt: skip


def life_of_call(
    place: int, name: str, text: str, status: str = "completed", **more: Any
) -> list[dict[str, Any]]:
    item = call(place, name, text, status, **more)
    at = {"item_id": item["id"], "output_index": place}
    added = {**item, "status": "in_progress", "arguments": ""}
    return [
        {"type": "response.output_item.added", "output_index": place, "item": added},
        {"type": "response.function_call_arguments.delta", **at, "delta": text},
        {"type": "response.function_call_arguments.done", **at, "arguments": text},
        {"type": "response.output_item.done", "output_index": place, "item": item},
    ]


DONE: list[Event] = [USED, Finish("stop")]


def test_a_message_has_every_event_of_its_life() -> None:
    events = [Prefilled(7, 2), Text("Hel"), Text("lo"), *DONE]
    expected = [*OPENED, *life_of_message(0, "Hello"), completed(message(0, "Hello"))]
    assert streamed(writer(), events) == expected


def test_reasoning_and_text_are_two_items() -> None:
    expected = [
        *OPENED, *life_of_reasoning(0, "hmm"), *life_of_message(1, "So."),
        completed(reasoning(0, "hmm"), message(1, "So.")),
    ]  # fmt: skip
    assert streamed(writer(), [Reasoning("hm"), Reasoning("m"), Text("So."), *DONE]) == expected


def test_two_calls_are_two_items_with_their_own_ids() -> None:
    events = [
        Reasoning("hmm"),
        *called(0, "look", '{"x":', "1}", call_id="call_1"),
        *called(1, "look", "{}", call_id="call_2"),
        USED, Finish("tool_calls"),
    ]  # fmt: skip
    expected = [
        *OPENED, *life_of_reasoning(0, "hmm"), *life_of_call(1, "look", '{"x":1}'),
        *life_of_call(2, "look", "{}"),
        completed(reasoning(0, "hmm"), call(1, "look", '{"x":1}'), call(2, "look", "{}")),
    ]  # fmt: skip
    assert streamed(writer(), events) == expected


def test_a_namespaced_tool_is_called_by_the_name_that_its_client_knows() -> None:
    expected = [
        *OPENED, *life_of_call(0, "get", "{}", namespace="ns"),
        completed(call(0, "get", "{}", namespace="ns")),
    ]  # fmt: skip
    assert streamed(writer(), [*called(0, "ns__get", "{}"), *DONE]) == expected


def test_a_custom_tool_is_called_with_plain_text() -> None:
    events = [*called(0, "patch", '{"in', 'put": "a\\', 'n\\"b', '\\""}'), *DONE]
    item = {
        "id": "ctc_10000", "type": "custom_tool_call", "status": "completed", "call_id": "call_0",
        "name": "patch", "input": 'a\n"b"',
    }  # fmt: skip
    at = {"item_id": "ctc_10000", "output_index": 0}
    added = {**item, "status": "in_progress", "input": ""}
    assert streamed(writer(), events) == [
        *OPENED,
        {"type": "response.output_item.added", "output_index": 0, "item": added},
        {"type": "response.custom_tool_call_input.delta", **at, "delta": 'a\n"b"'},
        {"type": "response.custom_tool_call_input.done", **at, "input": 'a\n"b"'},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        completed(item),
    ]


def test_an_answer_that_a_limit_cut_is_incomplete_and_says_why() -> None:
    ended = {
        **EMPTY, "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"},
        "usage": SPENT, "output": [message(0, "Hel", "incomplete")],
    }  # fmt: skip
    assert streamed(writer(), [Text("Hel"), USED, Finish("length")]) == [
        *OPENED,
        *life_of_message(0, "Hel", "incomplete"),
        {"type": "response.incomplete", "response": ended},
    ]


def test_a_call_that_a_limit_cut_is_incomplete_as_it_stands() -> None:
    events = [Text("So."), *called(0, "look", '{"x', call_id="call_1")[:-1], USED, Finish("length")]
    told = streamed(writer(), events)
    assert told[2:-1] == [*life_of_message(0, "So."), *life_of_call(1, "look", '{"x', "incomplete")]
    assert told[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize(("arguments", "heard"), [('{"inp', ""), ('{"input": "ab\\', "ab")])
def test_a_custom_call_that_a_limit_cut_has_the_input_that_was_settled(arguments: str, heard: str) -> None:
    told = streamed(writer(), [*called(0, "patch", arguments)[:-1], USED, Finish("length")])
    assert (told[-2]["item"]["input"], told[-2]["item"]["status"]) == (heard, "incomplete")


def test_a_failure_is_a_response_that_failed_with_what_was_said() -> None:
    failed = {
        **EMPTY, "status": "failed", "output": [message(0, "Hel", "incomplete")],
        "error": {"code": "server_error", "message": "broken", "param": None, "type": "internal_error"},
    }  # fmt: skip
    assert streamed(writer(), [Text("Hel"), Failure(error("internal_error", "broken"))]) == [
        *OPENED,
        *life_of_message(0, "Hel", "incomplete"),
        {"type": "response.failed", "response": failed},
    ]


def test_a_failure_makes_a_whole_answer_that_error() -> None:
    with pytest.raises(ApiError, match="broken"):
        writer().whole(said([Text("He"), Failure(error("internal_error", "broken"))]))


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    told = streamed(writer(), DONE)
    life = [event for event in life_of_message(0, "") if not event["type"].endswith(".delta")]
    assert told == [*OPENED, *life, completed(message(0, ""))]


def test_log_probabilities_belong_to_the_text_they_made() -> None:
    seen = [
        Logprobs(likely(token), (likely(token), likely("x", -2.0)))
        for token in ("Hm", "</think>", " So", ".")
    ]
    events = [seen[0], Reasoning("Hm"), seen[1], seen[2], Text("So"), seen[3], Text("."), *DONE]
    entries = [
        {
            "token": token, "bytes": [*token.encode()], "logprob": -0.5,
            "top_logprobs": [
                {"token": token, "bytes": [*token.encode()], "logprob": -0.5},
                {"token": "x", "bytes": [120], "logprob": -2.0},
            ],
        }
        for token in (" So", ".")
    ]  # fmt: skip
    told = streamed(writer(), events)
    assert told[8:14] == life_of_message(1, "So.", logprobs=entries)
    for cut in range(len(events)):
        stream = writer()
        parts = parsed(stream.write(said(events[:cut])) + stream.write(said(events[cut:])))
        deltas = [part["logprobs"] for part in parts if part["type"] == "response.output_text.delta"]
        assert [entry for delta in deltas for entry in delta] == entries


@pytest.mark.parametrize(
    "other",
    [
        [Reasoning("So")],
        [ToolCallStart(0, "call_0", "look")],
        [ToolCallArguments(0, "So")],
        [ToolCallEnd(0)],
    ],
)
def test_log_probabilities_of_anything_but_a_message_are_not_the_next_ones(other: list[Event]) -> None:
    token = Logprobs(likely("So"))
    before: list[Event] = [] if isinstance(other[0], Reasoning) else [*called(0, "look")[:1]]
    told = streamed(writer(), [*before, token, *other, token, Text("So"), *DONE])
    (part,) = told[-1]["response"]["output"][-1]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["So"]


def test_log_probabilities_of_text_that_was_held_wait_for_it() -> None:
    seen = [Logprobs(likely(token)) for token in ("<", "b", ">")]
    stream = writer()
    assert stream.write(said(seen[:2])) == b""
    told = parsed(stream.write(said([seen[2], Text("<b>")])))
    assert [entry["token"] for entry in told[-1]["logprobs"]] == ["<", "b", ">"]


def test_log_probabilities_after_the_last_text_are_the_open_messages() -> None:
    late = Logprobs(likely("<|pad|>"))
    for ending in ([USED, Finish("stop")], [Failure(error("internal_error", "broken"))]):
        told = streamed(writer(), [Logprobs(likely("So")), Text("So"), late, *ending])
        (part,) = told[-1]["response"]["output"][0]["content"]
        assert [entry["token"] for entry in part["logprobs"]] == ["So", "<|pad|>"]
    told = streamed(writer(), [Reasoning("So"), late, Failure(error("internal_error", "broken"))])
    assert "logprobs" not in told[-1]["response"]["output"][0]["content"][0]


def test_a_character_of_two_tokens_begins_a_message_with_both() -> None:
    seen = [
        Logprobs(TokenLogprob(data.decode(errors="replace"), data, -0.5))
        for data in (b"\xbd", b"</think>", b" \xf0\x9f", b"\x98\x80")
    ]
    told = streamed(writer(), [*seen, Text("😀"), *DONE])
    (part,) = told[-1]["response"]["output"][0]["content"]
    assert [bytes(entry["bytes"]) for entry in part["logprobs"]] == [b" \xf0\x9f", b"\x98\x80"]


def test_where_a_summary_is_asked_for_reasoning_is_one() -> None:
    told = streamed(writer(summary=True), [Reasoning("hm"), Text("So."), *DONE])
    item = {
        "id": "rs_10000", "type": "reasoning", "status": "completed", "content": [],
        "summary": [{"type": "summary_text", "text": "hm"}],
    }  # fmt: skip
    at = {"item_id": "rs_10000", "output_index": 0, "summary_index": 0}
    added = {**item, "status": "in_progress", "summary": []}
    assert told[2:8] == [
        {"type": "response.output_item.added", "output_index": 0, "item": added},
        {
            "type": "response.reasoning_summary_part.added", **at,
            "part": {"type": "summary_text", "text": ""},
        },
        {"type": "response.reasoning_summary_text.delta", **at, "delta": "hm"},
        {"type": "response.reasoning_summary_text.done", **at, "text": "hm"},
        {
            "type": "response.reasoning_summary_part.done", **at,
            "part": {"type": "summary_text", "text": "hm"},
        },
        {"type": "response.output_item.done", "output_index": 0, "item": item},
    ]  # fmt: skip


def test_reasoning_that_the_client_hands_back_is_sealed_when_it_is_done() -> None:
    told = streamed(writer(sealed=True), [Reasoning("hm…"), *DONE])
    assert told[2]["item"]["encrypted_content"] is None
    assert unseal(told[7]["item"]["encrypted_content"]) == "hm…"
    assert "encrypted_content" not in streamed(writer(), [Reasoning("hm"), *DONE])[7]["item"]


def test_a_keep_alive_has_the_next_number() -> None:
    stream = writer()
    stream.opening()
    first = parsed(stream.keep_alive())[0]
    assert (first["type"], first["sequence_number"], first["response"]) == ("response.in_progress", 2, EMPTY)
    stream.write(said([Text("a")]))
    assert parsed(stream.keep_alive())[0]["sequence_number"] == 6


def test_the_object_echoes_the_request() -> None:
    fields: dict[str, Any] = {
        "instructions": "Be.", "max_output_tokens": 9, "metadata": {"a": "b"}, "store": False,
        "background": True, "parallel_tool_calls": False, "temperature": 0.5, "top_p": 0.9,
        "tools": [
            {"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}, "strict": True},
        ],
        "tool_choice": {"type": "function", "name": "f"}, "reasoning": {"effort": "low", "summary": "auto"},
        "prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "top_logprobs": 2,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
                 "verbosity": "low"},
    }  # fmt: skip
    response = whole(writer(**fields), [Text("x"), *DONE])
    for name, value in fields.items():
        if name != "text":
            assert response[name] == value
    assert response["text"]["verbosity"] == "low"
    assert response["text"]["format"] == {
        "type": "json_schema", "name": "n", "description": None, "schema": {"type": "object"}, "strict": True,
    }  # fmt: skip
