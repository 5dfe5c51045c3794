"""One error in three envelopes: what each vendor's clients look for."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import ResponseErrorEvent

from mlxpool.shared import errors


def test_a_prompt_that_is_too_long_says_both_numbers_in_the_words_that_agents_look_for() -> None:
    err = errors.context_exceeded(5000, 4096, "messages")
    assert (err.status, err.code, err.param) == (400, "context_length_exceeded", "messages")
    openai = json.loads(errors.encode(err))["error"]
    assert openai["message"].startswith("This model's maximum context length is 4096 tokens. However, your ")
    assert "5000 tokens" in openai["message"]
    assert openai["code"] == "context_length_exceeded"
    anthropic = json.loads(errors.encode(err, "anthropic"))
    assert anthropic["error"]["message"] == "prompt is too long: 5000 tokens > 4096 maximum"
    assert anthropic["error"]["type"] == "invalid_request_error"
    assert json.loads(errors.encode(err, "responses"))["error"]["message"] == openai["message"]


def test_a_prompt_that_fills_the_context_is_more_than_what_leaves_room() -> None:
    err = errors.context_exceeded(4096, 4096, "prompt")
    assert err.anthropic == "prompt is too long: 4096 tokens > 4095 maximum"


def test_a_responses_stream_ends_with_an_error_that_has_its_number() -> None:
    told = errors.stream_event(errors.error("worker_crashed", "gone"), "responses", sequence=7)
    assert told.startswith(b'event: error\ndata: {"type":"error","sequence_number":7,')
    error = ResponseErrorEvent.model_validate_json(told[told.index(b"{") :], strict=True)
    assert (error.code, error.message, error.param, error.sequence_number) == (
        "worker_crashed", "gone", None, 7,
    )  # fmt: skip


@pytest.mark.parametrize("write", [errors.encode, errors.stream_event])
def test_anthropics_clients_find_the_requests_id_in_the_body(write: object) -> None:
    err = errors.error("queue_full", "busy")
    assert callable(write)
    told = write(err, "anthropic", "req-1").decode()
    assert json.loads(told[told.index("{") :])["request_id"] == "req-1"
    assert b"request_id" not in write(err, "anthropic")
    assert b"request_id" not in write(err, "openai", "req-1")
