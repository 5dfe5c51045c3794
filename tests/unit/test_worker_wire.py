"""The chat writer: events to one body, or to whole SSE events."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.shared.colibri.stats import TurnStats
from mlxpool.shared.errors import ApiError, error
from mlxpool.worker import server
from mlxpool.worker.mailbox import Mailbox
from mlxpool.worker.request_log import RequestLog
from mlxpool.worker.text.events import (
    Event,
    Failure,
    Finish,
    Logprobs,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from mlxpool.worker.wire.chat import DONE, ChatAnswer
from mlxpool.worker.wire.writer import Identity, Said

EVENTS: list[Event] = [Text("He"), Text("llo"), Usage(3, 2), Finish("stop")]


def answer(include_usage: bool = False, choices: int = 1, warnings: tuple[str, ...] = ()) -> ChatAnswer:
    return ChatAnswer(Identity("chatcmpl-1", 1700000000, "m"), include_usage, choices, warnings)


def of_choice(events: Sequence[Event], index: int = 0) -> list[Said]:
    return [(index, event) for event in events]


def events_of(data: bytes) -> list[Any]:
    """The SSE events in these bytes, which must be whole ones."""
    assert data == b"" or data.endswith(b"\n\n")
    bodies = [event.removeprefix(b"data: ") for event in data.split(b"\n\n") if event]
    return [body if body == b"[DONE]" else json.loads(body) for body in bodies]


def test_a_whole_answer_is_a_chat_completion() -> None:
    assert json.loads(answer().whole(of_choice(EVENTS))) == {
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
            "lane": "batch",
        },
    }


def test_a_failure_makes_a_whole_answer_that_error() -> None:
    with pytest.raises(ApiError, match="broken"):
        answer().whole(of_choice([Text("He"), Failure(error("internal_error", "broken"))]))


def test_texts_of_one_step_are_one_chunk() -> None:
    opened, finished, done = events_of(answer().write(of_choice(EVENTS)))
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
    told = events_of(stream.write(of_choice([Text("He"), Failure(error("internal_error", "broken"))])))
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
        data += stream.write(of_choice(events[start:end]))
    assert stream.ended
    assert data.endswith(DONE)
    chunks = events_of(data)[:-1]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "".join(texts)
    assert [choice["finish_reason"] for choice in choices].count("length") == 1
    used = [chunk for chunk in chunks if chunk.get("usage")]
    assert used == [chunks[-1]]
    assert (chunks[-1]["choices"] == []) is include_usage


CALLS: list[Event] = [
    Reasoning("hm"), Reasoning("m"), Text("Look:"),
    ToolCallStart(0, "call_a", "get"),
    ToolCallArguments(0, '{"x":'), ToolCallArguments(0, "1}"), ToolCallEnd(0),
    ToolCallStart(1, "call_b", "put"), ToolCallArguments(1, "{}"), ToolCallEnd(1),
    Usage(3, 9), Finish("tool_calls"),
]  # fmt: skip


def likely(token: str, logprob: float = -0.5) -> TokenLogprob:
    return TokenLogprob(token, token.encode(), logprob)


def test_calls_and_reasoning_have_their_own_fields_in_a_whole_answer() -> None:
    choice = json.loads(answer().whole(of_choice(CALLS)))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Look:",
        "refusal": None,
        "reasoning": "hmm",
        "reasoning_content": "hmm",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "get", "arguments": '{"x":1}'}},
            {"id": "call_b", "type": "function", "function": {"name": "put", "arguments": "{}"}},
        ],
    }


def test_an_answer_of_calls_alone_has_no_content() -> None:
    message = json.loads(answer().whole(of_choice(CALLS[3:])))["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


def test_a_streamed_call_has_its_id_and_name_once_and_its_own_index() -> None:
    chunks = events_of(answer().write(of_choice(CALLS)))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"reasoning": "hmm", "reasoning_content": "hmm"},
        {"content": "Look:"},
        {"tool_calls": [
            {"index": 0, "id": "call_a", "type": "function", "function": {"name": "get", "arguments": ""}},
        ]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x":1}'}}]},
        {"tool_calls": [
            {"index": 1, "id": "call_b", "type": "function", "function": {"name": "put", "arguments": ""}},
        ]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]  # fmt: skip
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_log_probabilities_are_the_same_streamed_and_whole_also_where_text_is_held() -> None:
    tokens = [Logprobs(likely("a"), (likely("a"), likely("b", -1.5))), Logprobs(likely("é", -9999.0))]
    events: list[Event] = [tokens[0], Text("a"), tokens[1], Usage(1, 2), Finish("length")]
    whole = json.loads(answer().whole(of_choice(events)))["choices"][0]["logprobs"]
    assert whole == {
        "content": [
            {"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": [
                {"token": "a", "bytes": [97], "logprob": -0.5},
                {"token": "b", "bytes": [98], "logprob": -1.5},
            ]},
            {"token": "é", "bytes": [195, 169], "logprob": -9999.0, "top_logprobs": []},
        ],
        "refusal": None,
    }  # fmt: skip
    for cut in range(len(events) + 1):
        stream = answer()
        data = stream.write(of_choice(events[:cut])) + stream.write(of_choice(events[cut:]))
        parts = [chunk["choices"][0]["logprobs"] for chunk in events_of(data)[:-1]]
        assert [entry for part in parts if part for entry in part["content"]] == whole["content"]


def test_choices_end_one_by_one_and_their_tokens_are_counted_together() -> None:
    stream = answer(choices=2)
    opened = events_of(stream.opening())
    assert [chunk["choices"][0]["index"] for chunk in opened] == [0, 1]
    said = [*of_choice([Text("x")], 1), *of_choice([Text("y")]), *of_choice([Text("z")], 1)]
    texts = events_of(stream.write(said))
    assert [(c["choices"][0]["index"], c["choices"][0]["delta"]["content"]) for c in texts] == [
        (1, "xz"), (0, "y"),
    ]  # fmt: skip
    (ended,) = events_of(stream.write(of_choice([Usage(5, 2), Finish("stop")], 1)))
    assert (ended["choices"][0]["index"], ended["choices"][0]["finish_reason"]) == (1, "stop")
    assert "usage" not in ended
    assert not stream.ended
    last, done = events_of(stream.write(of_choice([Usage(5, 7), Finish("length")])))
    assert last["usage"]["prompt_tokens"] == 5
    assert last["usage"]["completion_tokens"] == 9
    assert done == b"[DONE]"
    assert stream.ended


WARNED = ("grammar not enforced: the schema uses uniqueItems", "é")


@pytest.mark.parametrize("include_usage", [False, True])
def test_what_was_not_enforced_is_said_whole_and_on_the_last_finish_chunk_alone(include_usage: bool) -> None:
    assert json.loads(answer(warnings=WARNED).whole(of_choice(EVENTS)))["warnings"] == [*WARNED]
    stream = answer(include_usage, choices=2, warnings=WARNED)
    data = stream.opening() + stream.write([*of_choice(EVENTS, 1), *of_choice(EVENTS)])
    said = [chunk for chunk in events_of(data)[:-1] if "warnings" in chunk]
    assert [chunk["warnings"] for chunk in said] == [[*WARNED]]
    assert said[0]["choices"][0]["index"] == 0
    assert said[0]["choices"][0]["finish_reason"] == "stop"


def test_an_answer_that_lacks_nothing_has_no_warnings() -> None:
    stream = answer()
    assert b"warnings" not in stream.opening() + stream.write(of_choice(EVENTS))
    assert b"warnings" not in answer().whole(of_choice(EVENTS))


def test_a_keep_alive_speaks_of_a_choice_that_has_not_ended() -> None:
    stream = answer(choices=3)
    stream.write([*of_choice([Usage(5, 2), Finish("stop")]), *of_choice([Usage(5, 2), Finish("stop")], 1)])
    (alive,) = events_of(stream.keep_alive())
    assert [choice["index"] for choice in alive["choices"]] == [2]


def test_a_long_answer_is_put_together_in_time_that_grows_with_its_length() -> None:
    # Joining each piece to all before it would copy 400 GB.
    said = of_choice([*[Text("x" * 200)] * 64_000, Usage(1, 64_000), Finish("stop")])
    began_s = time.thread_time()
    assert len(json.loads(answer().whole(said))["choices"][0]["message"]["content"]) == 200 * 64_000
    assert len(events_of(answer().write(said))[0]["choices"][0]["delta"]["content"]) == 200 * 64_000
    assert time.thread_time() - began_s < 5


@pytest.mark.parametrize("pieces", [3, server.LOOP_EVENTS])
async def test_a_long_answer_is_encoded_off_the_loop(pieces: int) -> None:
    threads: list[int] = []

    class Noted(ChatAnswer):
        def whole(self, said: Iterable[Said]) -> bytes:
            threads.append(threading.get_ident())
            return super().whole(said)

    mailbox = Mailbox()
    mailbox.slot(0)([*[Text("x")] * pieces, Usage(1, pieces), Finish("stop")])
    log = RequestLog("req-1", "m", None)
    response = await server._whole(Noted(Identity("c", 1, "m")), 1, mailbox, log, {})
    assert isinstance(response.body, bytes)
    assert json.loads(response.body)["choices"][0]["message"]["content"] == "x" * pieces
    assert (threads == [threading.get_ident()]) is (pieces < server.LOOP_EVENTS)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (None, " s\n"),
        (
            TurnStats(hits=3, misses=1, read_bytes=64, wait_s=0.5),
            ", 3 of 4 experts held, 64 bytes read, 0.500 s",
        ),
        (TurnStats(), " s, no expert was waited for\n"),
    ],
)
def test_the_logs_line_tells_what_was_needed_of_experts(
    capsys: pytest.CaptureFixture[str], turn: TurnStats | None, said: str
) -> None:
    log = RequestLog("req-1", "m", None)
    row: Any = SimpleNamespace(turn=turn)
    log.rows = [row]
    log.end()
    assert said in capsys.readouterr().err
