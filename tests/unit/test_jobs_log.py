"""Logs of jobs: whole lines, bounded, read from any byte on by whoever is there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpool.parent.jobs import following, log
from mlxpool.parent.jobs.following import Readers
from mlxpool.parent.jobs.log import Cancelled, Event, Interrupted, JobLogs, Started
from mlxpool.parent.jobs.store import Job, JobStore
from mlxpool.shared.errors import ApiError
from mlxpool.shared.job_lines import Done, Failed, Log, Metric, Stage
from tests.unit.jobs_world import DONE, FOREVER, WAIT_S, World, parse, running, stage


class Book:
    """A store and logs, without anything that runs."""

    def __init__(self, home: Path) -> None:
        self.store = JobStore(now=lambda: 5.0)
        self.logs = JobLogs(home / "jobs", now=lambda: 7.0)
        self.readers = Readers(self.store, self.logs)

    def job(self) -> Job:
        return self.store.add("k", {})

    def path(self, job: Job) -> Path:
        return self.logs.path(job.id)

    async def say(self, job: Job, *events: Event) -> None:
        for event in events:
            self.logs.say(job.id, event)
        await self.logs.close()

    async def end(self, job: Job) -> None:
        self.store.end(job.id, "done", message="done", result={"n": 1})

    async def read(self, job: Job, offset: int = 0, follow: bool = True) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return b"".join([events async for events in self.readers.read(job, offset, follow)])


@pytest.fixture
async def book(tmp_path: Path) -> Book:
    return Book(tmp_path)


async def test_a_log_is_a_line_of_json_for_each_event(book: Book) -> None:
    job = book.job()
    events: list[Event] = [
        Started(), Stage("s", 1.5, "m\x07"), Metric({"loss": 0.5}), Log("a\x1b[1mb\tc\x1b[0m" + "x" * 5000),
        Failed("why"),
    ]  # fmt: skip
    await book.say(job, *events)
    lines = [msgspec.json.decode(line) for line in book.path(job).read_bytes().splitlines()]
    assert [(line["type"], line["time"]) for line in lines] == [
        (kind, 7.0) for kind in ("started", "stage", "metric", "log", "failed")
    ]
    assert lines[1] == {"type": "stage", "time": 7.0, "name": "s", "progress": 1.0, "message": "m"}
    assert lines[3]["line"] == "ab\tc" + "x" * 3996 + "…"
    assert lines[4]["error"] == "why"
    assert book.path(job).stat().st_mode & 0o777 == 0o600


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
EVENTS = st.one_of(
    st.builds(Log, TEXTS),
    st.builds(Stage, TEXTS, st.floats(0, 1), TEXTS),
    st.builds(Metric, st.dictionaries(TEXTS, st.floats(allow_nan=True), max_size=3)),
)


@settings(max_examples=40, deadline=None)
@given(said=st.lists(EVENTS, max_size=8), data=st.data())
def test_a_log_read_from_any_byte_on_gives_exactly_the_rest(
    tmp_path_factory: pytest.TempPathFactory, said: list[Event], data: st.DataObject
) -> None:
    async def check() -> None:
        book = Book(tmp_path_factory.mktemp("home"))
        job = book.job()
        await book.say(job, *said, Done({"ü": 1}))
        await book.end(job)
        raw = book.path(job).read_bytes()
        whole = parse(await book.read(job))
        assert b"".join(line + b"\n" for _, _, line in whole) == raw
        assert [place for _, place, _ in whole][-1] == len(raw)
        offset = data.draw(st.integers(0, len(raw)))
        rest = parse(await book.read(job, offset))
        # The events that begin at that byte or behind it.
        begins = [0, *(place for _, place, _ in whole)]
        assert rest == [event for begin, event in zip(begins, whole, strict=False) if begin >= offset]
        for place in begins:
            assert parse(await book.read(job, place)) == [event for event in whole if event[1] > place]

    asyncio.run(check())


async def test_a_place_beyond_the_end_is_refused_with_the_size(book: Book) -> None:
    job = book.job()
    for line in (b"", b'{"type":"started","time":7.0}\n'):
        await book.say(job, *([Started()] if line else []))
        with pytest.raises(ApiError) as caught:
            await book.read(job, 99)
        assert (caught.value.status, caught.value.param) == (400, "offset")
        assert f"the log has {len(line)} bytes" in caught.value.message


async def test_a_reader_hears_what_is_said_while_it_reads_and_leaves_with_the_last(book: Book) -> None:
    job = book.job()
    reading = asyncio.create_task(book.read(job))
    now = asyncio.create_task(book.read(job, follow=False))
    assert await now == b""
    for number in range(50):
        await book.say(job, Log(str(number)))
    await book.say(job, Cancelled("enough"))
    await book.end(job)
    events = parse(await reading)
    assert [kind for kind, _, _ in events] == ["log"] * 50 + ["cancelled"]
    assert [msgspec.json.decode(data)["line"] for _, _, data in events[:-1]] == [str(n) for n in range(50)]


async def test_silence_is_filled_with_comments(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "COMMENT_INTERVAL_S", 0.001)
    stream = book.readers.read(book.job(), 0, True)
    assert [await anext(stream) for _ in range(3)] == [b"", b": still here\n\n", b": still here\n\n"]
    await stream.aclose()  # type: ignore[attr-defined]


async def test_a_disk_that_takes_nothing_costs_events_and_readers_still_hear_the_end(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = book.job()
    await book.say(job, Log("before"))
    size = book.path(job).stat().st_size
    write, left = os.write, 3

    def nearly_full(descriptor: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(28, "No space left on device")
        took, left = min(left, len(data)), 0
        return write(descriptor, bytes(data[:took]))

    with monkeypatch.context() as full:
        full.setattr(log.os, "write", nearly_full)
        await book.say(job, Log("lost"), Done({"n": 1}))
    await book.end(job)
    # Nothing of a line that did not fit whole is left.
    assert book.path(job).stat().st_size == size
    events = parse(await book.read(job))
    assert [(kind, place) for kind, place, _ in events] == [("log", size), ("done", size)]
    assert msgspec.json.decode(events[-1][2])["result"] == {"n": 1}
    assert parse(await book.read(job, size)) == events[1:]


async def test_what_a_killed_server_left_half_written_is_cut_off(book: Book) -> None:
    job = book.job()
    await book.say(job, Started())
    whole = book.path(job).read_bytes()
    book.path(job).write_bytes(whole + b'{"type":"log","ti')
    assert [kind for kind, _, _ in parse(await book.read(job, follow=False))] == ["started"]
    await book.say(job, Interrupted("the server ended"))
    lines = book.path(job).read_bytes().splitlines(keepends=True)
    assert lines[0] == whole
    assert msgspec.json.decode(lines[1])["type"] == "interrupted"
    assert len(lines) == 2


async def test_lines_of_somebody_else_in_a_log_are_passed_over(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "PIECE_BYTES", 16)
    monkeypatch.setattr(following, "TAIL_BYTES", 1000)
    job = book.job()
    await book.say(job, Started())
    with book.path(job).open("ab") as file:
        file.write(b'\xff\n{"type":"log",\r"line":""}\n{"type":"bake"}\n[]\n\n' + b"x" * 5000 + b"\n")
    await book.say(job, Done({}))
    await book.end(job)
    assert [kind for kind, _, _ in parse(await book.read(job))] == ["started", "done"]


@pytest.mark.parametrize("what", ["folder", "pipe", "link"])
async def test_what_is_no_file_where_a_log_should_be_holds_up_nobody(book: Book, what: str) -> None:
    job = book.job()
    path = book.path(job)
    path.parent.mkdir()
    elsewhere = path.with_name("elsewhere")
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to(elsewhere)}[
        what
    ]()
    await book.say(job, Log("a"), Done({"n": 1}))
    await book.end(job)
    assert [kind for kind, _, _ in parse(await book.read(job))] == ["done"]
    assert not elsewhere.exists()


async def test_a_full_log_keeps_figures_new_stages_and_the_end(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "MAX_LOG_BYTES", 800)
    monkeypatch.setattr(log, "MAX_FIGURES_BYTES", 2000)
    job = book.job()
    chatter = [Log("x" * 200)] * 10
    await book.say(job, Stage("one", 0.1), *chatter, Stage("one", 0.2), Stage("two", 0.3), Metric({"n": 1}))
    await book.say(job, *[Metric({"n": 2.0})] * 100, Done({}))
    await book.end(job)
    events = parse(await book.read(job))
    told = [msgspec.json.decode(data) for _, _, data in events]
    assert [kind for kind, _, _ in events][:5] == ["stage", "log", "log", "log", "stage"]
    assert [event["name"] for event in told if event["type"] == "stage"] == ["one", "two"]
    kept = sum(event["type"] == "metric" for event in told)
    assert 1 < kept < 101
    assert told[-2]["line"] == f"{7 + 1 + 101 - kept} lines are left out above: the log is full"
    assert told[-1]["type"] == "done"
    assert book.path(job).stat().st_size < 2400


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running(tmp_path) as made:
        yield made


async def test_a_hundred_thousand_lines_are_all_there_and_the_loop_goes_on(world: World) -> None:
    code = f"sys.stdout.write(''.join(f'line {{n}}\\n' for n in range(100000)))\nsys.stdout.flush()\n{DONE}"
    job = await world.submit(code)
    reading = asyncio.create_task(world.read(job))
    await world.until(job, "done")
    events = parse(await reading)
    lines = [msgspec.json.decode(data)["line"] for kind, _, data in events if kind == "log"]
    assert lines == [f"line {n}" for n in range(100_000)]
    assert events[-1][0] == "done"


async def test_readers_that_stay_away_hold_up_nobody_and_are_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "MAX_READERS", 3)
    job = await world.submit(f"{stage(0.1, 'at it')}\n{FOREVER}")
    await world.until(job, "running", message="at it")
    # Three that open a stream and never take what comes.
    away = [world.readers.read(job, 0, True) for _ in range(3)]
    for stream in away:
        assert await anext(stream) == b""
    with pytest.raises(ApiError) as caught:
        await world.read(job)
    assert (caught.value.status, caught.value.message) == (429, "3 viewers read logs already, the limit")
    await away.pop().aclose()  # type: ignore[attr-defined]
    reading = asyncio.create_task(world.read(job))
    other = await world.submit(DONE, "other")
    await world.until(other, "done")
    world.jobs.cancel(job.id)
    assert [kind for kind, _, _ in parse(await reading)] == ["started", "stage", "cancelled"]
    for stream in away:
        await stream.aclose()  # type: ignore[attr-defined]
    assert [kind for kind, _, _ in parse(await world.read(other))] == ["started", "done"]
