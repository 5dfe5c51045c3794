"""Runs without their clients, where the worker, the pool or the file does what they should not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mlxpool.parent.edge import responses_background
from mlxpool.parent.edge.head import Head
from mlxpool.parent.edge.responses_answers import Prepared
from mlxpool.parent.edge.responses_background import Background, Run
from mlxpool.parent.edge.responses_lookup import Lookup
from mlxpool.parent.faults import Unavailable
from mlxpool.parent.history import recorder as recorder_module
from mlxpool.parent.history import streams
from mlxpool.parent.history.records import Record
from mlxpool.parent.history.resolve import Resolved
from mlxpool.shared.api.response_events import event
from mlxpool.shared.errors import ApiError, error

Carry = Callable[[Run], Awaitable[None]]


class Answers:
    """Answers whose worker is a function of the run. kept: what would be stored."""

    def __init__(self, carry: Carry) -> None:
        self._carry = carry
        self.kept: list[Record] = []
        self.written: list[Record | None] = []
        self.stored = True
        self.delete_fails = False
        self.deleted: list[str] = []
        self.store = SimpleNamespace(
            put=self._put, delete=self._delete, figures=SimpleNamespace(reason="full")
        )
        self.lookup = Lookup(self.store)  # type: ignore[arg-type]

    async def carry(self, prepared: Prepared, request_id: str, sink: Run, make_preamble: Any) -> None:
        del prepared, request_id, make_preamble
        await self._carry(sink)

    def keep(self, prepared: Prepared, response: bytes, events: tuple[bytes, ...] | None) -> Record | None:
        self.kept.append(prepared.record(response, events))
        return self.kept[-1]

    def write(self, prepared: Prepared, record: Record | None) -> None:
        del prepared
        self.written.append(record)

    async def _put(self, record: Record) -> bool:
        await asyncio.sleep(0)
        del record
        return self.stored

    async def _delete(self, response_id: str) -> bool:
        if self.delete_fails:
            raise Unavailable("the disk is full")
        self.deleted.append(response_id)
        return True


def prepared(body: bytes = b"{}") -> Prepared:
    return Prepared(Resolved(body, {}, b"[]"), Head("m", True, None), None, store=True, background=True)


class Hearing:
    """A listener's sink that is as slow as it is told."""

    def __init__(self, slow: Callable[[], Awaitable[None]] | None = None) -> None:
        self.heard = b""
        self.ended = False
        self._slow = slow

    async def start(self, headers: Mapping[str, str]) -> None:
        assert headers["content-type"].startswith("text/event-stream")

    async def send(self, data: bytes) -> None:
        self.heard += data
        if self._slow is not None:
            await self._slow()

    async def end(self) -> None:
        self.ended = True

    def told(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(text) for text in streams.events_of(self.heard)]


async def followed(run: Run, after: int = -1) -> list[dict[str, Any]]:
    sink = Hearing()
    async with asyncio.timeout(60):
        await run.follow(sink, after)  # type: ignore[arg-type]
    assert sink.ended
    return sink.told()


async def _nothing(run: Run) -> None:
    await run.start({})


async def _nonsense(run: Run) -> None:
    await run.start({})
    await run.send(b'event: response.created\ndata: {"type":"response.created","sequence_number":"x"}\n\n')


async def _bug(run: Run) -> None:
    del run
    raise ZeroDivisionError


async def _error_event(run: Run) -> None:
    await run.start({})
    await run.send(event("error", 0, code="worker_crashed", message="it broke", param=None))


@pytest.mark.parametrize("carry", [_nothing, _nonsense, _bug, _error_event])
async def test_whatever_a_worker_does_a_run_ends_is_kept_and_its_listeners_hear_it(carry: Carry) -> None:
    answers = Answers(carry)
    background = Background(answers)  # type: ignore[arg-type]
    run = await background.begin(prepared(), "m", "req")
    told = await followed(run)
    assert told[-1]["type"] == "response.failed"
    assert told[-1]["response"]["id"] == run.id
    assert [record.status for record in answers.kept] == ["failed"]
    assert answers.written == answers.kept == [run.record]
    await asyncio.sleep(0)  # its task's own end is noticed a turn later
    assert background.get(run.id) is None


async def test_an_end_that_can_not_be_made_leaves_a_failed_record_and_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken(*_: Any) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(recorder_module.Recorder, "end", broken)
    answers = Answers(_nothing)
    run = await Background(answers).begin(prepared(), "m", "req")  # type: ignore[arg-type]
    assert await followed(run) == []
    assert run.record.status == "failed"
    assert msgspec.json.decode(run.record.response)["error"]["type"] == "internal_error"
    assert answers.written == [run.record]


@pytest.mark.parametrize("delete_fails", [True, False])
async def test_a_refusal_of_the_pool_is_told_whatever_the_file_does(delete_fails: bool) -> None:
    async def carry(run: Run) -> None:
        del run
        raise error("queue_full", "full", retry_after_s=3)

    answers = Answers(carry)
    answers.delete_fails = delete_fails
    background = Background(answers)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="full") as refused:
        await background.begin(prepared(), "m", "req")
    assert (refused.value.status, refused.value.headers()) == (429, {"Retry-After": "3"})
    assert len(answers.deleted) == (0 if delete_fails else 1)


async def test_a_run_that_can_not_be_stored_is_refused_and_never_begins() -> None:
    begun: list[Run] = []

    async def carry(run: Run) -> None:
        begun.append(run)

    answers = Answers(carry)
    answers.stored = False
    background = Background(answers)  # type: ignore[arg-type]
    with pytest.raises(ApiError, match=r"stored now \(full\)") as refused:
        await background.begin(prepared(), "m", "req")
    assert refused.value.status == 503
    assert refused.value.headers()
    await background.close()
    assert begun == answers.kept == []


async def _forever(run: Run) -> None:
    await run.start({})
    await asyncio.Event().wait()


async def test_runs_are_bounded_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_background, "RUNS_BYTES", 2 * 2**20)
    background = Background(Answers(_forever))  # type: ignore[arg-type]
    large = prepared(b" " * 3 * 2**20)
    first = await background.begin(large, "m", "req")
    with pytest.raises(ApiError, match="hold 2 MiB together") as refused:
        await background.begin(prepared(), "m", "req")
    assert (refused.value.code, refused.value.headers()) == ("queue_full", {"Retry-After": "10"})
    await first.stop("cancelled")
    second = await background.begin(prepared(), "m", "req")
    await second.send(b"x" * 2 * 2**20)
    with pytest.raises(ApiError, match="MiB"):
        await background.begin(prepared(), "m", "req")
    await background.close()


async def test_a_run_that_is_stopped_before_its_first_step_ends_all_the_same() -> None:
    answers = Answers(_forever)
    run = Run(answers, prepared(), "m", "req")  # type: ignore[arg-type]
    run.begin()
    await run.stop("cancelled")
    assert run.record.status == "cancelled"
    assert answers.written == [run.record]


async def test_a_run_that_is_stored_while_the_server_stops_is_refused() -> None:
    answers = Answers(_forever)
    background = Background(answers)  # type: ignore[arg-type]
    beginning = asyncio.create_task(background.begin(prepared(), "m", "req"))
    await asyncio.sleep(0)
    await background.close()
    with pytest.raises(ApiError, match="stopping"):
        await beginning
    assert len(answers.deleted) == 1
    assert answers.kept == []


def _delta(number: int) -> bytes:
    return event("response.output_text.delta", number, output_index=0, content_index=0, delta="x" * 100)


async def test_a_listener_that_keeps_up_hears_all_of_a_stream_too_long_to_be_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder_module, "HELD_BYTES", 20_000)

    async def carry(run: Run) -> None:
        await run.start({})
        await run.send(event("response.created", 0, response={"id": run.id, "output": []}))
        for number in range(1, 1000):
            await run.send(_delta(number))
            await asyncio.sleep(0)

    run = await Background(Answers(carry)).begin(prepared(), "m", "req")  # type: ignore[arg-type]
    told = await followed(run)
    assert run.recorder.dropped > 500
    assert [one["sequence_number"] for one in told] == list(range(1001))
    assert told[-1]["type"] == "response.failed"


async def test_a_listener_that_falls_behind_is_told_so_by_a_numbered_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder_module, "HELD_BYTES", 20_000)
    heard, more = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        heard.set()
        await more.wait()

    run = Run(Answers(_forever), prepared(), "m", "req")  # type: ignore[arg-type]
    sink = Hearing(slow)
    for number in range(3):
        await run.send(_delta(number))
    following = asyncio.create_task(run.follow(sink, -1))  # type: ignore[arg-type]
    await heard.wait()
    for number in range(3, 500):
        await run.send(_delta(number))
    more.set()
    await following
    assert [(one["type"], one["sequence_number"]) for one in sink.told()[2:]] == [
        ("response.output_text.delta", 2),
        ("error", 3),
    ]
    assert "no longer held" in sink.told()[-1]["message"]
    late = Hearing()
    await run.follow(late, 7)  # type: ignore[arg-type]
    assert [(one["type"], one["sequence_number"]) for one in late.told()] == [("error", 8)]
