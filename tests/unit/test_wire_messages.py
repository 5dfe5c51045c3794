"""The writer of /v1/messages: Anthropic's events in their order, and the whole message that they come to."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from mlxpool.shared.api import anthropic
from mlxpool.shared.api.anthropic import Shown
from mlxpool.shared.errors import ApiError, error
from mlxpool.worker.text.events import (
    Event,
    Failure,
    Finish,
    FinishReason,
    Prefilled,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    Usage,
)
from mlxpool.worker.wire.messages import PING, SIGNATURE, MessageAnswer
from mlxpool.worker.wire.writer import Identity, Said
from tests.tools.answers import every_case, run

STREAMED: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {
    "input_tokens": 6,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 4,
    "output_tokens": 0,
    "prompt_tokens": 10,
    "completion_tokens": 0,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
    "lane": "batch",
}
SPENT = {**USAGE, "output_tokens": 5, "completion_tokens": 5, "total_tokens": 15}


def answer(thinking: bool = True) -> MessageAnswer:
    return MessageAnswer(Identity("msg_1", 1700000000, "m", request_id="req-1"), Shown(thinking))


def row(*said: Event, reason: FinishReason = "stop", stop: str | None = None) -> list[Said]:
    events = [Prefilled(10, 4), *said, Usage(10, 5, 4), Finish(reason, stop)]
    return [(0, event) for event in events]


def call(index: int, arguments: Sequence[str], ended: bool = True) -> list[Event]:
    pieces: list[Event] = [ToolCallArguments(index, text) for text in arguments]
    end: list[Event] = [ToolCallEnd(index)] if ended else []
    return [ToolCallStart(index, f"call_{index:024}", "get"), *pieces, *end]


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events in these bytes, each named by its type as the protocol has it, and by the client's types."""
    assert data == b"" or data.endswith(b"\n\n")
    events = []
    for block in filter(None, data.split(b"\n\n")):
        name, line = block.split(b"\n")
        event = json.loads(line.removeprefix(b"data: "))
        assert name == b"event: " + event["type"].encode()
        if event["type"] not in ("ping", "error"):
            STREAMED.validate_python(event, strict=True)
        events.append(event)
    return events


def body(said: Iterable[Said], thinking: bool = True) -> dict[str, Any]:
    found = json.loads(answer(thinking).whole(said))
    Message.model_validate(found, strict=True)
    return dict(found)


def start(index: int, block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": fields}


def stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def test_every_event_of_thinking_text_and_two_calls() -> None:
    said = row(
        Reasoning("Hm"), Reasoning("."), Text("I look."), *call(0, ['{"x"', ": 1}"]), *call(1, []),
        reason="tool_calls",
    )  # fmt: skip
    stream = answer()
    assert stream.opening() == b""
    assert events_of(stream.write(said)) == [
        {
            "type": "message_start",
            "message": {
                "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [],
                "stop_reason": None, "stop_sequence": None, "usage": USAGE,
            },
        },
        start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, type="thinking_delta", thinking="Hm."),
        delta(0, type="signature_delta", signature=SIGNATURE),
        stop(0),
        start(1, {"type": "text", "text": ""}),
        delta(1, type="text_delta", text="I look."),
        stop(1),
        start(2, {"type": "tool_use", "id": f"toolu_{0:024}", "name": "get", "input": {}}),
        delta(2, type="input_json_delta", partial_json='{"x": 1}'),
        stop(2),
        start(3, {"type": "tool_use", "id": f"toolu_{1:024}", "name": "get", "input": {}}),
        stop(3),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": SPENT,
        },
        {"type": "message_stop"},
    ]  # fmt: skip
    assert stream.ended


def test_a_whole_message_has_the_same_blocks() -> None:
    said = row(Reasoning("Hm."), Text("I look."), *call(0, ['{"x"', ": 1}"]), reason="tool_calls")
    assert body(said) == {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": f"toolu_{0:024}", "name": "get", "input": {"x": 1}},
        ],
        "stop_reason": "tool_use", "stop_sequence": None, "usage": SPENT,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "stopped_by", "told"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", None, ("max_tokens", None)),
        ("tool_calls", None, ("tool_use", None)),
        ("tool_calls", "END", ("tool_use", None)),
    ],
)
def test_why_an_answer_ended(reason: FinishReason, stopped_by: str | None, told: object) -> None:
    said = row(Text("a"), reason=reason, stop=stopped_by)
    whole = body(said)
    assert (whole["stop_reason"], whole["stop_sequence"]) == told
    assert events_of(answer().write(said))[-2]["delta"] == {
        "stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"],
    }  # fmt: skip


def test_until_the_prompt_is_done_there_are_pings_alone_and_then_its_true_counts() -> None:
    stream = answer()
    assert stream.keep_alive() == PING
    (begun,) = events_of(stream.write([(0, Prefilled(10, 4))]))
    assert begun["message"]["usage"] == USAGE
    assert events_of(stream.keep_alive()) == [{"type": "ping"}]


def test_the_beginning_says_already_how_the_request_runs() -> None:
    (begun,) = events_of(answer().write([(0, Prefilled(10, 4, "turns"))]))
    assert begun["message"]["usage"] == {**USAGE, "lane": "turns"}


def test_an_end_that_nothing_came_before_has_its_own_counts() -> None:
    *_, end, _ = events_of(answer().write([(0, Usage(10, 5, 4)), (0, Finish("stop"))]))
    assert end["usage"] == SPENT


@pytest.mark.parametrize("call_id", ["functions.get:0", "aB3dE6gH9", f"call_{0:024}"])
def test_a_call_has_an_id_as_clients_know_them_and_the_next_turn_has_the_models_own(call_id: str) -> None:
    said = row(ToolCallStart(0, call_id, "get"), ToolCallArguments(0, "{}"), ToolCallEnd(0))
    (made,) = body(said)["content"]
    assert re.fullmatch(r"toolu_[a-zA-Z0-9_-]+", made["id"])
    result = {"type": "tool_result", "tool_use_id": made["id"], "content": "1"}
    turns = [
        {"role": "user", "content": "x"}, {"role": "assistant", "content": [made]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    asked = anthropic.parse(json.dumps({"max_tokens": 1, "messages": turns}).encode())
    _, called, answered = asked.request.messages
    assert (called.tool_calls[0].id, answered.tool_call_id) == (call_id, call_id)


@pytest.mark.parametrize("blanks", ["\n", " \n\t", "\n\n"])
def test_blanks_alone_are_no_block(blanks: str) -> None:
    said = row(Reasoning("Hm."), Text(blanks), *call(0, ["{}"]), Text(blanks), reason="tool_calls")
    assert [block["type"] for block in body(said)["content"]] == ["thinking", "tool_use"]
    starts = [event for event in events_of(answer().write(said)) if event["type"] == "content_block_start"]
    assert [event["content_block"]["type"] for event in starts] == ["thinking", "tool_use"]
    assert body(row(Text(blanks)))["content"] == []


def test_what_could_not_be_done_is_said_with_the_reason_of_the_end() -> None:
    told = ("grammar not enforced: it is too large",)
    identity = Identity("msg_1", 0, "m")
    streamed = events_of(MessageAnswer(identity, Shown(), told).write(row(Text("a"))))
    assert [event["type"] for event in streamed if "warnings" in event] == ["message_delta"]
    assert streamed[-2]["warnings"] == list(told)
    assert "warnings" not in streamed[0]["message"]
    whole = json.loads(MessageAnswer(identity, Shown(), told).whole(row(Text("a"))))
    assert whole["warnings"] == list(told)
    assert "warnings" not in body(row(Text("a")))


def test_blanks_before_text_are_a_part_of_it() -> None:
    stream = answer()
    data = b"".join(stream.write([event]) for event in row(Text("\n"), Text(" "), Text("a"), Text(" ")))
    deltas = [event["delta"] for event in events_of(data) if event["type"] == "content_block_delta"]
    assert [change["text"] for change in deltas] == ["\n a", " "]
    assert body(row(Text("\n"), Text(" a"), Text(" ")))["content"] == [{"type": "text", "text": "\n a "}]


def test_blanks_that_something_else_followed_are_not_a_part_of_later_text() -> None:
    said = row(Text("\n"), *call(0, ["{}"]), Text("a"), reason="tool_calls")
    assert body(said)["content"][1] == {"type": "text", "text": "a"}
    assert delta(1, type="text_delta", text="a") in events_of(answer().write(said))


def test_any_number_of_blanks_takes_no_time_to_speak_of() -> None:
    stream = answer()
    began_s = time.thread_time()
    for _ in range(100_000):
        stream.write([(0, Text("\n"))])
    (_, told) = events_of(stream.write([(0, Text("a"))]))
    assert len(told["delta"]["text"]) == 100_001
    assert time.thread_time() - began_s < 3


def test_thinking_that_the_client_wants_omitted_is_a_block_without_text() -> None:
    said = row(Reasoning("Hm."), Text("Yes."))
    assert body(said, thinking=False)["content"][0] == {
        "type": "thinking", "thinking": "", "signature": SIGNATURE,
    }  # fmt: skip
    assert b"Hm." not in answer(thinking=False).write(said)


def test_a_call_that_the_limit_cut_is_closed_and_its_input_is_an_object() -> None:
    said = row(*call(0, ['{"x": "ab'], ended=False), reason="length")
    assert body(said)["content"][0]["input"] == {}
    assert events_of(answer().write(said))[-3] == stop(0)


def test_a_failure_is_the_last_event_and_a_whole_answers_error() -> None:
    failure = Failure(error("internal_error", "broken"))
    stream = answer()
    *_, last = events_of(stream.write([(0, Prefilled(10, 4)), (0, Text("a")), (0, failure)]))
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "broken", "code": "internal_error"},
        "request_id": "req-1",
    }
    assert stream.ended
    with pytest.raises(ApiError, match="broken"):
        answer().whole([(0, failure)])


PIECES = st.lists(
    st.one_of(
        st.text(st.sampled_from("ab é\n"), min_size=1, max_size=5).map(Text),
        st.text(st.sampled_from("ab é\n"), min_size=1, max_size=5).map(Reasoning),
        st.sampled_from(['{"a": 1}', '{"b": "é"}', ""]),
    ),
    max_size=8,
)


@given(PIECES, st.randoms(), st.booleans())
def test_every_chunking_comes_to_the_whole_message(pieces: list[Any], chance: Any, thinking: bool) -> None:
    said: list[Event] = []
    calls = 0
    for piece in pieces:
        if isinstance(piece, str):
            cut = chance.randint(0, len(piece))
            said += call(calls, [part for part in (piece[:cut], piece[cut:]) if part])
            calls += 1
        else:
            said.append(piece)
    assert_streams_to_the_whole(row(*said), chance, thinking)


@pytest.mark.parametrize(("recording", "case"), every_case(), ids=lambda one: getattr(one, "name", ""))
def test_every_recorded_answer_streams_to_its_whole_message(recording: Any, case: Any) -> None:

    said = run(list(case.text), recording.answer_format(case))
    for seed in range(3):
        assert_streams_to_the_whole(row(*said), random.Random(seed), thinking=True)


def assert_streams_to_the_whole(said: list[Said], chance: Any, thinking: bool) -> None:
    stream = answer(thinking)
    data = b""
    rest = said
    while rest:
        cut = chance.randint(1, len(rest))
        data += stream.write(rest[:cut])
        rest = rest[cut:]
    assert stream.ended
    events = events_of(data)
    assert [event["type"] for event in (events[0], *events[-2:])] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    assert put_together(events) == body(said, thinking)


def put_together(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream; fails where blocks are out of order."""
    message: dict[str, Any] = {}
    pieces: list[str] = []
    open_block: int | None = None
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(message["content"])
                open_block, pieces = event["index"], []
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                block, change = message["content"][-1], event["delta"]
                if change["type"] == "input_json_delta":
                    pieces.append(change["partial_json"])
                else:
                    name = change["type"].removesuffix("_delta")
                    block[name] += change[name]
            case "content_block_stop":
                assert event["index"] == open_block
                if pieces:
                    message["content"][-1]["input"] = json.loads("".join(pieces))
                open_block = None
            case "message_delta":
                assert open_block is None
                message.update(event["delta"], usage=event["usage"])
    return message
