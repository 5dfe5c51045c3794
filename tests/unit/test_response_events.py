"""A response's object, its items as the next turn's input, and its stream made again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mlxpool.shared.api.response_events import event, output_as_input, replay, terminal_kind
from mlxpool.shared.api.response_object import compaction, failure, new_response, seal, unsaid, unseal
from mlxpool.shared.errors import ApiError, error

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

TEXT = {"type": "output_text", "annotations": [], "logprobs": [], "text": "Hi"}
MESSAGE = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [TEXT]}
THOUGHT = {
    "id": "rs_1", "type": "reasoning", "status": "completed", "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}], "encrypted_content": seal("hm"),
}  # fmt: skip
CALL = {
    "id": "fc_1", "type": "function_call", "status": "completed", "call_id": "c", "name": "f",
    "arguments": "{}", "namespace": "ns",
}  # fmt: skip
PATCH = {
    "id": "ctc_1", "type": "custom_tool_call", "status": "completed", "call_id": "d", "name": "p",
    "input": "x",
}  # fmt: skip


def response(*output: object, status: str = "completed", **fields: object) -> dict[str, Any]:
    made = new_response({}, id="resp_1", created=1, model="m")
    return {**made, "status": status, "output": [*output], **fields}


def events_of(data: bytes) -> list[dict[str, Any]]:
    events = [json.loads(whole.split(b"data: ", 1)[1]) for whole in data.split(b"\n\n")[:-1]]
    for told in events:
        _EVENTS.validate_python(told)
    return events


def test_an_event_begins_with_its_kind_and_its_number() -> None:
    assert event("response.output_text.delta", 7, delta="a\nb") == (
        b"event: response.output_text.delta\n"
        b'data: {"type":"response.output_text.delta","sequence_number":7,"delta":"a\\nb"}\n\n'
    )


def test_a_finished_response_is_told_as_its_stream() -> None:
    whole = response(THOUGHT, MESSAGE, CALL, PATCH, completed_at=2)
    told = events_of(b"".join(replay(whole)))
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert [one["type"].removeprefix("response.") for one in told] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    assert told[0]["response"] == told[1]["response"] == unsaid(whole)
    assert unsaid(whole) == response(status="in_progress")
    assert [one["item"] for one in told if one["type"].endswith("item.done")] == whole["output"]
    assert [one["output_index"] for one in told[2:-1]] == [0] * 6 + [1] * 6 + [2] * 4 + [3] * 4
    assert told[-1]["response"] == whole


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("completed", "response.completed"),
        ("incomplete", "response.incomplete"),
        ("failed", "response.failed"),
        ("cancelled", "response.incomplete"),
    ],
)
def test_a_stream_ends_as_the_response_did(status: str, kind: str) -> None:
    assert terminal_kind(status) == kind
    told = events_of(b"".join(replay(response(MESSAGE, status=status))))
    assert (told[-1]["type"], told[-1]["response"]["status"]) == (kind, status)


@pytest.mark.parametrize("status", ["queued", "in_progress"])
def test_a_response_that_runs_has_no_end(status: str) -> None:
    assert events_of(b"".join(replay(response(MESSAGE, status=status))))[-1]["type"] == (
        "response.output_item.done"
    )


@pytest.mark.parametrize(
    "item",
    [
        compaction("cmp_1", "They met."),
        {**MESSAGE, "content": [TEXT, TEXT]},
        {**MESSAGE, "content": []},
        {**MESSAGE, "content": [{"type": "refusal", "refusal": "No."}]},
        {**THOUGHT, "summary": [{"type": "summary_text", "text": "x"}]},
        {**THOUGHT, "content": None},
        {**CALL, "extra": 1},
    ],
)
def test_an_item_of_another_make_is_told_in_one_piece(item: dict[str, Any]) -> None:
    added, done = events_of(b"".join(replay(response(item))))[2:-1]
    assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
    assert added["item"] == done["item"] == item


def test_an_incomplete_item_is_told_as_it_was_cut() -> None:
    cut = {**CALL, "status": "incomplete", "arguments": '{"x'}
    told = events_of(b"".join(replay(response(cut, status="incomplete"))))
    assert told[-2]["item"] == cut
    assert told[-3]["arguments"] == '{"x'


def test_output_goes_on_as_input_without_what_says_nothing_new() -> None:
    likely = {**TEXT, "logprobs": [{"token": "Hi", "bytes": [], "logprob": 0.0, "top_logprobs": []}]}
    bare_text = {name: value for name, value in TEXT.items() if name != "logprobs"}
    bare_thought = {name: value for name, value in THOUGHT.items() if name != "encrypted_content"}
    told = {**THOUGHT, "content": [], "summary": [{"type": "summary_text", "text": "hm"}]}
    output = [THOUGHT, {**MESSAGE, "content": [likely]}, CALL, PATCH, told, compaction("cmp", "x")]
    assert output_as_input(output) == [
        bare_thought, {**MESSAGE, "content": [bare_text]}, CALL, PATCH, told, compaction("cmp", "x"),
    ]  # fmt: skip


def test_a_call_that_was_cut_is_no_part_of_the_next_turn() -> None:
    cut = [{**CALL, "status": "incomplete"}, {**PATCH, "status": "incomplete"}]
    kept = {**MESSAGE, "status": "incomplete"}
    assert [item["id"] for item in output_as_input([kept, *cut])] == ["msg_1"]


@given(st.text())
def test_sealed_text_opens_again(text: str) -> None:
    assert unseal(seal(text)) == text


@pytest.mark.parametrize(
    "value", ["", "gAAAAAB", seal("text")[:-1], seal("text") + "!", "mlxpool1.w6k", "mlxpool2.dGV4dA=="]
)
def test_what_others_sealed_or_damage_hit_stays_closed(value: str) -> None:
    assert unseal(value) is None


@pytest.mark.parametrize(
    ("err", "code"),
    [
        (error("worker_crashed", "x"), "server_error"),
        (error("internal_error", "x"), "server_error"),
        (error("queue_full", "x"), "rate_limit_exceeded"),
        (error("invalid_request", "x", param="input"), "invalid_prompt"),
        # What agents compact at, though the client's own list of codes lacks it.
        (error("context_length_exceeded", "x"), "context_length_exceeded"),
    ],
)
def test_a_failure_has_a_code_that_clients_know_and_ours_beside_it(err: ApiError, code: str) -> None:
    assert failure(err) == {"code": code, "message": "x", "param": err.param, "type": err.code}


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(sorted(new_response({}, id="r", created=1, model="m"))), junk))
def test_a_body_that_nobody_has_checked_makes_an_object_all_the_same(fields: dict[str, Any]) -> None:
    # What is echoed as it stands is for the worker to refuse.
    for name in ("tools", "tool_choice", "metadata", "instructions", "reasoning"):
        fields.pop(name, None)
    made = new_response(fields, id="resp_1", created=1, model="m", status="queued")
    Response.model_validate(made)
    assert (made["id"], made["status"], made["output"], made["usage"]) == ("resp_1", "queued", [], None)
