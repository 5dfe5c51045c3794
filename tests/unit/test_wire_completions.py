"""The writer of /v1/completions: one body, or whole SSE events that come to the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from mlxpool.shared.errors import ApiError, error
from mlxpool.worker.text.events import (
    Event,
    Failure,
    Finish,
    Logprobs,
    Prefilled,
    Text,
    TokenLogprob,
    Usage,
)
from mlxpool.worker.wire.completions import CompletionAnswer
from mlxpool.worker.wire.writer import Identity, Said

DONE = b"[DONE]"


def answer(include_usage: bool = False, rows: int = 1, choices: int = 1) -> CompletionAnswer:
    return CompletionAnswer(Identity("cmpl-1", 1700000000, "m"), include_usage, rows, choices)


def events_of(data: bytes) -> list[Any]:
    assert data == b"" or data.endswith(b"\n\n")
    bodies = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    return [body if body == DONE else json.loads(body) for body in bodies]


def token(
    data: bytes, logprob: float = -1.0, *top: tuple[bytes, float], chars: int | None = None
) -> Logprobs:
    """chars: those that it adds to the text, where they are not its own."""
    added = len(data.decode("utf-8", "ignore")) if chars is None else chars
    return Logprobs(_named(data, logprob), tuple(_named(*other) for other in top), added)


def _named(data: bytes, logprob: float) -> TokenLogprob:
    return TokenLogprob(data.decode("utf-8", "replace"), data, logprob)


def row(*said: Event, index: int = 0, prompt: int = 3, cached: int = 1) -> list[Said]:
    texts = sum(isinstance(event, Text) for event in said)
    end: list[Event] = [Usage(prompt, texts, cached), Finish("stop")]
    return [(index, event) for event in [Prefilled(prompt, cached), *said, *end]]


@pytest.mark.parametrize("include_usage", [False, True])
def test_what_could_not_be_done_is_said_with_the_last_finish(include_usage: bool) -> None:
    told = ("grammar not enforced: it is too large",)
    identity = Identity("cmpl-1", 0, "m")
    streamed = CompletionAnswer(identity, include_usage, 2, 2, told)
    events = events_of(streamed.write([*row(Text("a")), *row(Text("b"), index=1)]))
    said = [event for event in events if event != DONE and "warnings" in event]
    assert [(event["choices"][0]["index"], event["warnings"]) for event in said] == [(1, list(told))]
    assert said[0]["choices"][0]["finish_reason"] == "stop"
    whole = json.loads(CompletionAnswer(identity, include_usage, 1, 1, told).whole(row(Text("a"))))
    assert whole["warnings"] == list(told)
    assert "warnings" not in json.loads(answer().whole(row(Text("a"))))


def test_a_whole_answer_is_a_text_completion() -> None:
    body = json.loads(answer().whole(row(Text(" He"), Text("llo"))))
    assert body == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "m",
        "choices": [{"index": 0, "text": " Hello", "finish_reason": "stop", "logprobs": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
            "lane": "batch",
        },
    }
    Completion.model_validate(body, strict=True)


def test_a_stream_is_text_then_the_reason_with_the_usage() -> None:
    stream = answer()
    assert stream.opening() == b""
    told, finished, done = events_of(stream.write(row(Text("He"), Text("llo"))))
    assert told["choices"] == [{"index": 0, "text": "Hello", "finish_reason": None, "logprobs": None}]
    assert "usage" not in told
    assert finished["choices"] == [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}]
    assert finished["usage"]["total_tokens"] == 5
    assert done == DONE
    assert stream.ended


def test_usage_that_was_asked_for_has_a_chunk_of_its_own() -> None:
    told, finished, usage, done = events_of(answer(include_usage=True).write(row(Text("a"))))
    assert told["usage"] is finished["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 3
    assert done == DONE


def test_a_keep_alive_is_a_chunk_without_text_of_a_choice_that_runs() -> None:
    stream = answer(rows=2, choices=2)
    stream.write(row(Text("a"), index=0))
    (alive,) = events_of(stream.keep_alive())
    assert alive["choices"] == [{"index": 1, "text": "", "finish_reason": None, "logprobs": None}]


def test_each_prompt_counts_once_however_many_answers_it_has() -> None:
    said = [
        *row(Text("a"), index=0, prompt=10, cached=2), *row(Text("b"), index=1, prompt=10, cached=9),
        *row(Text("c"), index=2, prompt=7, cached=3), *row(Text("d"), index=3, prompt=7, cached=6),
    ]  # fmt: skip
    body = json.loads(answer(rows=4, choices=2).whole(said))
    assert [choice["text"] for choice in body["choices"]] == ["a", "b", "c", "d"]
    assert body["usage"]["prompt_tokens"] == 17
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


def test_a_failure_ends_a_stream_and_is_a_whole_answers_error() -> None:
    failure = Failure(error("internal_error", "broken"))
    stream = answer()
    _, told, done = events_of(stream.write([(0, Text("a")), (0, failure)]))
    assert told["error"]["message"] == "broken"
    assert done == DONE
    assert stream.ended
    with pytest.raises(ApiError, match="broken"):
        answer().whole([(0, failure)])


def test_logprobs_have_this_protocols_own_shape() -> None:
    said = row(
        token(b" He", -0.5, (b" He", -0.5), (b" She", -1.5)), Text(" He"),
        token(b"\xf0\x9f", -0.25, (b"\xf0\x9f", -0.25)), token(b"\x98\x80", -0.1, chars=1),
        token(b"!", -2.0), Text("😀!"),
    )  # fmt: skip
    body = json.loads(answer().whole(said))
    assert body["choices"][0]["logprobs"] == {
        "tokens": [" He", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "!"],
        "token_logprobs": [-0.5, -0.25, -0.1, -2.0],
        "top_logprobs": [
            {" He": -0.5, " She": -1.5},
            {"bytes:\\xf0\\x9f": -0.25},
            {"bytes:\\x98\\x80": -0.1},
            {"!": -2.0},
        ],
        "text_offset": [0, 3, 3, 4],
    }
    Completion.model_validate(body, strict=True)


def test_logprobs_of_a_stream_count_on_over_its_chunks() -> None:
    stream = answer()
    first = events_of(stream.write([(0, token(b"ab")), (0, Text("ab"))]))
    second = events_of(stream.write([(0, token(b"c")), (0, token(b"d")), (0, Text("cd"))]))
    assert first[0]["choices"][0]["logprobs"]["text_offset"] == [0]
    assert second[0]["choices"][0]["logprobs"]["text_offset"] == [2, 3]
    last = events_of(stream.write([(0, token(b"e")), (0, Usage(1, 4)), (0, Finish("stop"))]))
    assert last[0]["choices"][0]["logprobs"]["text_offset"] == [4]


def test_a_special_token_takes_no_place_in_the_text() -> None:
    said = row(token(b"<|im_start|>", chars=0), token(b"ab"), token(b"c"), Text("abc"))
    logprobs = json.loads(answer().whole(said))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<|im_start|>", "ab", "c"]
    assert logprobs["text_offset"] == [0, 0, 2]


def test_reading_a_token_twice_keeps_the_likelier() -> None:
    body = json.loads(answer().whole(row(token(b"a", -3.0, (b"x", -0.5), (b"x", -0.7)), Text("a"))))
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -0.5, "a": -3.0}]


PIECES = st.lists(st.text(min_size=1, max_size=4), max_size=6)


@given(st.lists(PIECES, min_size=1, max_size=4), st.randoms(), st.booleans(), st.booleans())
def test_every_chunking_of_every_mixture_of_rows_comes_to_the_whole_answer(
    texts: list[list[str]], chance: Any, include_usage: bool, with_logprobs: bool
) -> None:
    rows = [
        row(*(
            event for text in pieces
            for event in ([token(text.encode("utf-8", "replace"))] if with_logprobs else []) + [Text(text)]
        ), index=index, prompt=index + 1)
        for index, pieces in enumerate(texts)
    ]  # fmt: skip
    mixed: list[Said] = []
    while any(rows):
        chosen = chance.choice([said for said in rows if said])
        mixed.append(chosen.pop(0))
    whole = json.loads(answer(rows=len(texts)).whole(mixed))
    stream = answer(include_usage, rows=len(texts))
    data = b""
    rest: Sequence[Said] = mixed
    while rest:
        cut = chance.randint(1, len(rest))
        data += stream.write(rest[:cut])
        rest = rest[cut:]
    assert stream.ended
    *chunks, done = events_of(data)
    assert done == DONE
    said = ["".join(chunk_of(chunk, index)["text"] for chunk in chunks) for index in range(len(texts))]
    assert said == [choice["text"] for choice in whole["choices"]]
    for index, choice in enumerate(whole["choices"]):
        parts = [chunk_of(chunk, index) for chunk in chunks]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
        if choice["logprobs"] is not None:
            for name, values in choice["logprobs"].items():
                assert [value for part in parts for value in (part["logprobs"] or {}).get(name, [])] == values
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [whole["usage"]]
    for chunk in chunks:
        # The protocol's null before the end is no reason to the client's own types.
        for part in chunk["choices"]:
            part["finish_reason"] = part["finish_reason"] or "stop"
        Completion.model_validate(chunk, strict=True)


def chunk_of(chunk: dict[str, Any], index: int) -> dict[str, Any]:
    nothing = {"text": "", "finish_reason": None, "logprobs": None}
    return next((choice for choice in chunk["choices"] if choice["index"] == index), nothing)
