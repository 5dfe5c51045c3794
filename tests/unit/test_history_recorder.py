"""A stream on its way: its end is noticed, its bytes are kept, and a bad end is made out of what passed."""

from __future__ import annotations

import asyncio
import itertools
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.parent.edge.responses_sinks import Tee
from mlxpool.parent.history import folding as folding_module
from mlxpool.parent.history import recorder as module
from mlxpool.parent.history import streams
from mlxpool.parent.history.folding import Folding
from mlxpool.parent.history.recorder import Recorder
from mlxpool.shared.api.response_events import event, replay
from mlxpool.shared.api.response_items import Call, Item, Message, Reasoning
from mlxpool.shared.api.response_object import new_response, unseal
from mlxpool.shared.errors import error

LOGPROB = {"token": "b", "bytes": [98], "logprob": -0.5, "top_logprobs": []}


def items() -> list[dict[str, Any]]:
    """One item of each kind, done."""
    machines: list[tuple[Item, list[tuple[str, list[Any] | None]]]] = [
        (Reasoning("rs_1", 0, sealed=True), [("thi", None), ("nk", None)]),
        (Reasoning("rs_2", 1, as_summary=True), [("sum", None)]),
        (Message("msg_1", 2), [("a\n\nevent: x", [LOGPROB]), ("é\u2028", [LOGPROB])]),
        (Call("fc_1", 3, "call_1", "f", namespace="n"), [('{"x": ', None), ("1}", None)]),
        (Call("ctc_1", 4, "call_2", "patch", custom=True), [("*** Begin", None)]),
    ]
    return [life(machine, said)[1] for machine, said in machines]


def life(machine: Item, said: list[tuple[str, list[Any] | None]]) -> tuple[list[Any], dict[str, Any]]:
    told = machine.begin()
    for text, logprobs in said:
        machine.add(text, logprobs)
        told += machine.flush()
    return told + machine.end("completed"), machine.item("completed")


RESPONSE = {
    **new_response({"metadata": {"k": "v"}}, id="resp_1", created=5, model="m"),
    "status": "completed",
}
RESPONSE["output"] = items()
EVENTS = list(replay(RESPONSE))


def recorder() -> tuple[Recorder, list[tuple[bytes, Any]]]:
    kept: list[tuple[bytes, Any]] = []
    made = Recorder(lambda response, events: kept.append((response, events)))
    made.begun = lambda: {**RESPONSE, "status": "in_progress", "output": []}
    return made, kept


def chunks(data: list[bytes], cuts: list[int]) -> Iterator[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        yield b"".join(data[start:end])


@given(st.lists(st.integers(min_value=0), max_size=8))
async def test_the_end_is_kept_before_it_is_passed_on_however_the_stream_is_cut(cuts: list[int]) -> None:
    made, kept = recorder()
    for piece in chunks(EVENTS, cuts):
        assert kept == []
        assert await made.passing(piece) == piece
    ((response, events),) = kept
    assert msgspec.json.decode(response) == RESPONSE
    assert b"".join(events) == b"".join(EVENTS)


@pytest.mark.parametrize("passed", range(len(EVENTS)))
async def test_a_stream_that_breaks_off_anywhere_fails_with_what_it_had_said(passed: int) -> None:
    made, kept = recorder()
    for piece in EVENTS[:passed]:
        await made.passing(piece)
    last = await made.end("failed", error("worker_crashed", "it died"))
    assert await made.passing(last) == last  # the exchange sends what it was given
    told = [msgspec.json.decode(text) for text in streams.events_of(b"".join(EVENTS[:passed]) + last)]
    assert [one["sequence_number"] for one in told] == list(range(len(told)))
    assert told[0]["type"] == "response.created"
    final = told[-1]["response"]
    assert (told[-1]["type"], final["status"], final["metadata"]) == ("response.failed", "failed", {"k": "v"})
    assert (final["error"]["code"], final["error"]["message"]) == ("server_error", "it died")
    done = sum(one["type"] == "response.output_item.done" for one in told)
    added = sum(one["type"] == "response.output_item.added" for one in told)
    assert final["output"][:done] == RESPONSE["output"][:done]
    assert len(final["output"]) == added
    for item, whole in zip(final["output"][done:], RESPONSE["output"][done:], strict=False):
        assert (item["status"], item["id"]) == ("incomplete", whole["id"])
        assert set(item) == set(whole)
    ((response, events),) = kept
    assert msgspec.json.decode(response) == final
    assert b"".join(events) == b"".join(EVENTS[:passed]) + last


def test_an_item_that_was_cut_has_what_was_said_of_it() -> None:
    machine = Message("msg_1", 0)
    told = machine.begin()
    for text in ("one ", "two"):
        machine.add(text, [LOGPROB])
        told += machine.flush()
    thought = Reasoning("rs_1", 1, sealed=True)
    told += thought.begin()
    thought.add("hm")
    told += thought.flush()
    call = Call("fc_1", 2, "call_1", "f")
    told += call.begin()
    call.add('{"a"')
    told += call.flush()
    folding = Folding()
    folding.feed(b"".join(event(kind, n, **fields) for n, (kind, fields) in enumerate(told)))
    message, reasoning, cut = msgspec.json.decode(folding.output())
    assert message["content"][0]["text"] == "one two"
    assert message["content"][0]["logprobs"] == [LOGPROB, LOGPROB]
    assert unseal(reasoning["encrypted_content"]) == "hm"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (cut["arguments"], cut["status"]) == ('{"a"', "incomplete")
    assert folding.number == len(told) - 1


async def test_a_client_that_left_is_told_of_by_an_incomplete_end_whose_status_is_cancelled() -> None:
    made, kept = recorder()
    await made.passing(b"".join(EVENTS[:-1]))
    last = await made.end("cancelled")
    assert last.startswith(b"event: response.incomplete\n")
    assert msgspec.json.decode(kept[0][0])["status"] == "cancelled"
    assert await made.end("cancelled") == b""
    assert len(kept) == 1


async def test_a_stream_too_long_to_hold_is_read_as_it_goes_and_its_end_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HELD_BYTES", 2000)
    made, kept = recorder()
    for piece in EVENTS[:-2]:
        if not made.noted(piece):
            await made.passing(piece)
    assert made.dropped > 0
    assert sum(map(len, made.pieces)) == made.held_bytes < 4000
    await made.end("cancelled")
    response, events = kept[0]
    assert events is None
    assert msgspec.json.decode(response)["output"][:4] == RESPONSE["output"][:4]


async def test_the_newer_half_of_a_long_stream_stays_for_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_BYTES", 4000)
    made, _ = recorder()
    for piece in EVENTS[:-1]:
        await made.passing(piece)
        assert made.held_bytes > 1000 or not made.dropped
    assert made.dropped > 0
    assert made.pieces == EVENTS[made.dropped : -1]


async def test_an_end_that_is_interrupted_and_told_again_tells_what_was_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HELD_BYTES", 2000)
    made, kept = recorder()
    machine = Message("msg_1", 0)
    told = machine.begin()
    for number in range(40):
        machine.add(f"{number} ", None)
        told += machine.flush()
    for number, (kind, fields) in enumerate(told, 1):
        await made.passing(event(kind, number, **fields))
    ending = asyncio.create_task(made.end("failed", error("worker_crashed", "it died")))
    await asyncio.sleep(0)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    assert await made.end("cancelled")
    final = msgspec.json.decode(kept[0][0])
    assert final["output"][0]["content"][0]["text"] == "".join(f"{number} " for number in range(40))
    assert (final["status"], final["error"]["message"]) == ("failed", "it died")


@pytest.mark.parametrize("together", [True, False])
async def test_a_stream_that_ends_with_an_error_event_has_failed_with_its_reason(together: bool) -> None:
    made, kept = recorder()
    said = b"".join(EVENTS[:5])
    bad = event("error", 5, code="worker_crashed", message="it broke", param=None)
    if together:
        sent = await made.passing(said + bad)
    else:
        sent = await made.passing(said) + await made.passing(bad)
    told = [msgspec.json.decode(text) for text in streams.events_of(sent)]
    assert [one["sequence_number"] for one in told] == list(range(6))
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["error"]["type"] == "worker_crashed"
    assert told[-1]["response"]["error"]["message"] == "it broke"
    ((response, events),) = kept
    assert (msgspec.json.decode(response), b"".join(events)) == (told[-1]["response"], sent)


@pytest.mark.parametrize(
    "data", [b"event: error\ndata: 5\n\n", b"event: error\n\n", b'event: error\ndata: {"code":7}\n\n']
)
async def test_an_error_event_that_says_nothing_is_a_failure_all_the_same(data: bytes) -> None:
    made, kept = recorder()
    await made.passing(data)
    assert msgspec.json.decode(kept[0][0])["error"]["type"] == "internal_error"


@pytest.mark.parametrize(
    "bad",
    [
        b'event: response.created\ndata: {"type":"response.created","sequence_number":"x"}\n\n',
        event("response.created", 0, response=[]),
        event("response.output_item.added", 1, output_index=0, item={"type": "message", "content": None})
        + event("response.content_part.added", 2, output_index=0, part={"text": ""}),
        b"event: x\ndata: \xff\n\n",
    ],
)
async def test_a_stream_that_can_not_be_read_ends_and_is_kept(bad: bytes) -> None:
    made, kept = recorder()
    await made.passing(bad)
    assert (await made.end("failed", error("worker_crashed", "it died"))).count(
        b"event: response.failed\n"
    ) == 1
    final = msgspec.json.decode(kept[0][0])
    assert (final["status"], final["output"], final["metadata"]) == ("failed", [], {"k": "v"})


def test_log_probabilities_of_a_cut_item_stay_bytes_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(count: int) -> Any:
        machine = Message("msg_1", 0)
        told = machine.begin()
        for _ in range(count):
            machine.add("b", [LOGPROB])
            told += machine.flush()
        folding = Folding()
        folding.feed(b"".join(event(kind, n, **fields) for n, (kind, fields) in enumerate(told)))
        return msgspec.json.decode(folding.output())[0]["content"][0]

    monkeypatch.setattr(folding_module, "LOGPROB_BYTES", 10 * len(msgspec.json.encode(LOGPROB)))
    assert cut(10)["logprobs"] == [LOGPROB] * 10
    assert (cut(11)["logprobs"], cut(11)["text"]) == ([], "b" * 11)


async def test_a_long_stream_with_log_probabilities_takes_no_more_memory_than_its_bytes() -> None:
    many = [{**LOGPROB, "top_logprobs": [LOGPROB] * 20}]
    machine = Message("msg_1", 0)
    told = machine.begin()
    machine.add("b", many)
    delta = machine.flush()
    folding = Folding()
    folding.feed(b"".join(event(kind, n, **fields) for n, (kind, fields) in enumerate(told)))
    piece = b"".join(event(kind, 9, **fields) for kind, fields in delta)
    tracemalloc.start()
    for _ in range(1000):
        folding.feed(piece)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1.5 * 1000 * len(piece)


async def test_a_long_stream_is_kept_without_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENT_BYTES", 2000)
    made, kept = recorder()
    for piece in EVENTS:
        await made.passing(piece)
    assert kept == [(msgspec.json.encode(RESPONSE), None)]


def test_events_behind_a_number_are_found_by_their_lines() -> None:
    whole = b"".join(EVENTS)
    for number in (-1, 0, 7, len(EVENTS) - 2):
        assert streams.after(whole, number) == b"".join(EVENTS[number + 1 :])
    assert streams.after(whole, len(EVENTS) - 1) == b""
    assert streams.after(b"", 0) == b""
    assert [streams.last_number(b"".join(EVENTS[:count])) for count in (0, 1, 8)] == [-1, 0, 7]


def test_only_a_last_event_ends_a_stream() -> None:
    assert streams.final_response(EVENTS[-1]) is not None
    assert streams.final_response(b"".join(EVENTS)) is not None
    assert streams.final_response(EVENTS[-1] + EVENTS[0]) is None
    assert all(streams.final_response(one) is None for one in EVENTS[:-1])
    assert [streams.ends(one) for one in EVENTS] == [False] * (len(EVENTS) - 1) + [True]
    said = event("response.output_text.delta", 1, delta="\n\nevent: response.completed\ndata: {}\n\n")
    assert streams.final_response(said) is None


def test_what_an_item_says_comes_in_its_deltas_alone() -> None:
    told = [msgspec.json.decode(text) for text in streams.events_of(b"".join(EVENTS))]
    added = [one["item"] for one in told if one["type"] == "response.output_item.added"]
    assert [item.get("arguments", item.get("input", item.get("content"))) for item in added] == [
        [],
        [],
        [],
        "",
        "",
    ]


class Hearing:
    """A sink that notes what was kept when each piece reached it."""

    def __init__(self, kept: list[Any]) -> None:
        self.started = False
        self.heard: list[tuple[bytes, int]] = []
        self.statuses: list[tuple[int, Any]] = []
        self._kept = kept

    async def start(self, headers: Any) -> None:
        self.started = headers == {}

    async def send(self, data: bytes) -> None:
        self.heard.append((data, len(self._kept)))

    async def end(self) -> None:
        pass

    async def whole(self, status: int, body: bytes, headers: Any) -> None:
        self.heard.append((body, len(self._kept)))
        self.statuses.append((status, headers))

    def abandon(self) -> None:
        pass


async def test_whoever_hears_the_end_finds_it_kept() -> None:
    made, kept = recorder()
    sink = Hearing(kept)
    tee = Tee(sink, made, 0)
    await tee.start({})
    for piece in EVENTS:
        await tee.send(piece)
    assert sink.heard == [(piece, 0) for piece in EVENTS[:-1]] + [(EVENTS[-1], 1)]
    made, kept = recorder()
    sink = Hearing(kept)
    await Tee(sink, made, 0).whole(200, msgspec.json.encode(RESPONSE), {})
    assert sink.heard == [(msgspec.json.encode(RESPONSE), 1)]


async def test_a_refusal_is_not_kept_and_counts_the_clients_own_items() -> None:
    made, kept = recorder()
    sink = Hearing(kept)
    await Tee(sink, made, 3).whole(400, b'{"error":{"param":"input[5]"}}', {})
    assert sink.heard == [(b'{"error":{"param":"input[2]"}}', 0)]
    assert sink.statuses == [(400, {})]
    assert kept == []
