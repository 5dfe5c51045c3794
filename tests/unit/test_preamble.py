"""What the parent says in a worker's place, protocol by protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from mlxpool.parent.edge.preamble import (
    ChatPreamble,
    CompletionPreamble,
    MessagesPreamble,
    Preamble,
    ResponsesPreamble,
)
from mlxpool.parent.edge.responses_sinks import RecordedPreamble
from mlxpool.parent.edge.whole_events import WholeEvents
from mlxpool.parent.history.recorder import Recorder
from mlxpool.shared.api import response_events
from mlxpool.shared.errors import error
from tests.tools import sse

CRASH = error("worker_crashed", "it died")
# A client's text that looks like the numbers that are moved.
TRAP = {"text": 'data: {"type":"x","sequence_number":7', "nested": {"type": "x", "sequence_number": 7}}


def every_preamble() -> list[Preamble]:
    return [ChatPreamble("m"), CompletionPreamble("m"), MessagesPreamble("req_1"), recorded()[0]]


def recorded(fields: Mapping[str, Any] = {}, previous: str | None = None) -> tuple[Preamble, Recorder]:
    """A preamble of Responses and who records what is said."""
    recorder = Recorder(lambda *_: None)
    return RecordedPreamble("m", fields, previous, recorder, 0), recorder


def worker_stream(total: int) -> bytes:
    """A response's stream as a worker writes it: two events that open it, then others."""
    kinds = ["response.created", "response.in_progress", *["response.output_text.delta"] * (total - 3)]
    events = [response_events.event(kind, n, extra=TRAP) for n, kind in enumerate(kinds)]
    return b"".join((*events, response_events.event("response.completed", total - 1, response=TRAP)))


def numbers(data: bytes) -> list[int]:
    return [json.loads(event.data)["sequence_number"] for event in sse.read(data, whole=False)]


@pytest.mark.parametrize("keep_alives", [0, 1, 9, 1000])
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_numbers_of_a_response_stay_strict_however_long_the_parent_spoke(
    keep_alives: int, piece: int
) -> None:
    preamble = ResponsesPreamble("m", {})
    said = preamble.opening() + b"".join(preamble.keep_alive() for _ in range(keep_alives))
    said += preamble.keep_alive()
    events = WholeEvents(preamble.replaced)
    worker = worker_stream(9)
    for start in range(0, len(worker), piece):
        said += preamble.passed(events.feed(worker[start : start + piece]))
    assert numbers(said) == list(range(len(numbers(said))))
    whole = sse.read(said, whole=False)
    assert [event.name for event in whole[:2]] == ["response.created", "response.in_progress"]
    assert [event.name for event in whole].count("response.created") == 1
    assert json.loads(whole[-1].data)["response"] == TRAP
    assert json.loads(whole[-2].data)["extra"] == TRAP


async def test_a_response_that_fails_is_told_as_one_with_the_next_number() -> None:
    preamble, recorder = recorded({"store": False, "metadata": {"a": "b"}}, "resp_before")
    said = preamble.opening() + preamble.keep_alive()
    await recorder.passing(said)
    last = await preamble.failure(CRASH)
    assert numbers(said + last) == [0, 1, 2]
    failed = json.loads(sse.read(last, whole=False)[0].data)
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["id"], response["status"]) == (preamble.response_id, "failed")
    assert response["error"]["message"] == "it died"
    assert (response["store"], response["metadata"], response["previous_response_id"]) == (
        False,
        {"a": "b"},
        "resp_before",
    )


ENDS: list[tuple[int, bytes]] = [
    (0, b"data: [DONE]\n\n"),
    (1, b"data: [DONE]\n\n"),
    (2, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    (2, b'event: error\ndata: {"type":"error"}\n\n'),
    (3, b"event: response.completed\ndata: {}\n\n"),
    (3, b"event: response.incomplete\ndata: {}\n\n"),
    (3, b"event: response.failed\ndata: {}\n\n"),
    (3, b"event: error\ndata: {}\n\n"),
]


@pytest.mark.parametrize(("place", "end"), ENDS)
def test_a_stream_is_over_at_its_protocols_own_end(place: int, end: bytes) -> None:
    preamble = every_preamble()[place]
    other = b"event: ping\ndata: message_stop response.completed\n\n"
    assert preamble.is_end(end)
    assert preamble.is_end(other + other + end)
    assert not preamble.is_end(other)
    assert not preamble.is_end(end + other)


async def test_a_failure_ends_the_stream_in_each_protocol() -> None:
    for preamble in every_preamble():
        assert preamble.is_end(await preamble.failure(CRASH))
        assert not preamble.is_end(preamble.opening() + preamble.keep_alive())


async def test_only_openais_streams_end_with_done() -> None:
    done = [b"[DONE]" in await preamble.failure(CRASH) for preamble in every_preamble()]
    assert done == [True, True, False, False]


def test_each_id_has_its_protocols_prefix_and_is_its_own() -> None:
    ids = [preamble.response_id for preamble in (*every_preamble(), *every_preamble())]
    assert [name.rpartition("_")[0] or name.rpartition("-")[0] for name in ids[:4]] == [
        "chatcmpl",
        "cmpl",
        "msg",
        "resp",
    ]
    assert len(set(ids)) == len(ids)


def test_completions_are_opened_and_kept_alive_with_chunks_of_no_text() -> None:
    preamble = CompletionPreamble("alias")
    for said in (preamble.opening(), preamble.keep_alive()):
        chunk: dict[str, Any] = json.loads(sse.read(said, whole=False)[0].data)
        assert (chunk["object"], chunk["model"], chunk["id"]) == (
            "text_completion",
            "alias",
            preamble.response_id,
        )
        assert chunk["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": None}]


def test_messages_are_opened_and_kept_alive_with_pings() -> None:
    preamble = MessagesPreamble("req_1")
    assert preamble.opening() == preamble.keep_alive() == b'event: ping\ndata: {"type":"ping"}\n\n'
