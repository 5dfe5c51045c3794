"""The chat writer: events to one body, or to whole SSE events."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared.errors import ApiError, error
from mlxpool.worker.text.events import Event, Failure, Finish, Text, Usage
from mlxpool.worker.wire.chat import DONE, ChatAnswer

EVENTS: list[Event] = [Text("He"), Text("llo"), Usage(3, 2), Finish("stop")]


def answer(include_usage: bool = False) -> ChatAnswer:
    return ChatAnswer("chatcmpl-1", 1700000000, "m", include_usage)


def events_of(data: bytes) -> list[Any]:
    """The SSE events in these bytes, which must be whole ones."""
    assert data == b"" or data.endswith(b"\n\n")
    bodies = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    return [body if body == b"[DONE]" else json.loads(body) for body in bodies]


def test_a_whole_answer_is_a_chat_completion() -> None:
    assert json.loads(answer().whole(EVENTS)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_failure_makes_a_whole_answer_that_error() -> None:
    with pytest.raises(ApiError, match="broken"):
        answer().whole([Text("He"), Failure(error("internal_error", "broken"))])


def test_texts_of_one_step_are_one_chunk() -> None:
    opened, finished, done = events_of(answer().write(EVENTS))
    assert opened["choices"][0] == {
        "index": 0, "delta": {"content": "Hello"}, "finish_reason": None, "logprobs": None,
    }  # fmt: skip
    assert finished["choices"][0]["delta"] == {}
    assert finished["choices"][0]["finish_reason"] == "stop"
    assert finished["usage"]["total_tokens"] == 5
    assert done == b"[DONE]"


def test_a_keep_alive_is_a_chunk_like_the_others_that_says_nothing() -> None:
    stream = answer()
    (alive,) = events_of(stream.keep_alive())
    assert alive == {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "m",
        "choices": [{"index": 0, "delta": {}, "finish_reason": None, "logprobs": None}],
    }  # fmt: skip
    assert not stream.ended


def test_a_failure_in_a_stream_is_an_error_event_that_ends_it() -> None:
    stream = answer()
    told = events_of(stream.write([Text("He"), Failure(error("internal_error", "broken"))]))
    assert told[0]["choices"][0]["delta"] == {"content": "He"}
    assert told[1]["error"]["code"] == "internal_error"
    assert told[2] == b"[DONE]"
    assert stream.ended


@given(st.lists(st.text(min_size=1)), st.lists(st.integers(0, 30)), st.booleans())
def test_any_grouping_of_events_gives_the_same_stream(
    texts: list[str], cuts: list[int], include_usage: bool
) -> None:
    events: list[Event] = [*map(Text, texts), Usage(1, len(texts)), Finish("length")]
    edges = sorted({0, len(events), *(cut % (len(events) + 1) for cut in cuts)})
    stream = answer(include_usage)
    data = stream.opening()
    for start, end in itertools.pairwise(edges):
        assert not stream.ended
        data += stream.write(events[start:end])
    assert stream.ended
    assert data.endswith(DONE)
    chunks = events_of(data)[:-1]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "".join(texts)
    assert [choice["finish_reason"] for choice in choices].count("length") == 1
    used = [chunk for chunk in chunks if chunk.get("usage")]
    assert used == [chunks[-1]]
    assert (chunks[-1]["choices"] == []) is include_usage
