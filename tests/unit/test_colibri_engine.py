"""What the engine does for a model whose experts are streamed: order of passes and tokens, giving up, faults.

The stream is scripted and the model a real tiny one: what a pass reads is not the point here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from mlxpool.shared.colibri.stats import ColibriStats, ExpertSummary, HeatMap, ResidencyStats
from mlxpool.shared.control import AdaptersLaunch, CacheLaunch
from mlxpool.shared.errors import ApiError
from mlxpool.worker.adapters.mounted import STREAMED_REFUSAL, Adapters
from mlxpool.worker.colibri.faults import Interrupted, ReadFault
from mlxpool.worker.engine.chunks import ChunkWidth
from mlxpool.worker.engine.row import Row
from mlxpool.worker.engine.streamed import Streamed, turn
from mlxpool.worker.text.answer import AnswerText
from mlxpool.worker.text.detokeniser import ByteDetokeniser
from mlxpool.worker.text.events import Failure, Finish
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Client, Running, plan, token_bytes, until

WAIT_S = 60


class Scripted:
    """A stream that counts four misses of ten bytes a pass and can be made to wait or fail within one."""

    def __init__(self) -> None:
        self.stop: Callable[[], bool] = lambda: False
        self.progress = 0
        self.slots = 8
        self.slot_bytes = 1000
        self.turns = 0
        self.within: Callable[[tuple[int, int]], None] = lambda _: None
        self.file: str | None = None

    def layer(self, shape: tuple[int, int]) -> None:
        self.within(shape)
        if self.stop():
            raise Interrupted("nobody waits")
        self.progress += 1

    def stats(self) -> ColibriStats:
        passes = self.progress
        return ColibriStats(
            main=ResidencyStats(
                hits=passes * 12, misses=passes * 4, read_bytes=passes * 40, wait_s=passes / 2
            )
        )

    def heat(self) -> HeatMap:
        return HeatMap([])

    def overwritten(self) -> str | None:
        return self.file

    def turn_ended(self) -> None:
        self.turns += 1

    def resize(self, slots: int) -> None:
        self.slots = slots

    def save(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def stream() -> Scripted:
    return Scripted()


async def started(start: Start, stream: Scripted, **settings: Any) -> Running:
    running = await start(batch=1, stream=stream, **settings)
    running.model.before = stream.layer
    return running


async def test_answers_are_those_of_a_model_in_memory(start: Start, stream: Scripted) -> None:
    resident, streamed = await start(batch=1), await started(start, stream)
    for wanted in (
        plan(range(40), max_tokens=12),
        plan(range(41), max_tokens=12, temperature=1.0, seed=5),
        plan(range(30), max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5, top_logprobs=2),
        plan(range(1), max_tokens=3),
    ):
        assert (await streamed.ask(wanted)).events == (await resident.ask(wanted)).events


async def test_a_token_is_told_before_the_next_pass_begins(start: Start, stream: Scripted) -> None:
    running = await started(start, stream)
    told: list[int] = []
    go = threading.Semaphore(0)

    def wait(shape: tuple[int, int]) -> None:
        if shape == (1, 1):
            assert go.acquire(timeout=WAIT_S)

    stream.within = wait
    client, _ = running.submit(plan(range(1), max_tokens=3))
    for passes in (1, 2, 3):
        go.release()
        # The next pass waits for us, and its predecessor's token has come all the same.
        await until(lambda passes=passes: running.engine.counters.tokens == passes)  # type: ignore[misc]
        await until(lambda: bool(client.events))
        told.append(len(client.text))
    await client.ended.wait()
    assert told == sorted(told)
    assert client.usage.completion_tokens == 3


async def test_no_pass_is_run_after_the_last_token(start: Start, stream: Scripted) -> None:
    running = await started(start, stream)
    free = await running.ask(plan(range(40), max_tokens=6))
    assert running.model.shapes == [(1, 16), (1, 16), (1, 7), *[(1, 1)] * 6]
    sampled = [ord(letter) for letter in free.text]
    running.model.shapes.clear()
    ended = await running.ask(plan(range(40), max_tokens=200, eos=sampled[2:3]))
    assert ended.events[-1] == Finish("stop")
    assert running.model.shapes.count((1, 1)) == ended.usage.completion_tokens


async def test_the_second_request_waits_for_the_first(start: Start, stream: Scripted) -> None:
    running = await started(start, stream)
    first, _ = running.submit(plan(range(20), max_tokens=10))
    second, _ = running.submit(plan(range(30), max_tokens=10))
    await second.ended.wait()
    assert first.ended.is_set()
    assert running.model.shapes == [(1, 16), (1, 3), *[(1, 1)] * 10, (1, 16), (1, 13), *[(1, 1)] * 10]


async def test_a_client_that_leaves_in_the_middle_of_a_pass_ends_it_there(
    start: Start, stream: Scripted, capfd: pytest.CaptureFixture[str]
) -> None:
    running = await started(start, stream)
    expected = await running.ask(plan(range(50), max_tokens=5))
    within, go = threading.Event(), threading.Event()

    def wait(shape: tuple[int, int]) -> None:
        within.set()
        assert go.wait(WAIT_S)

    stream.within = wait
    begun = stream.progress
    client, row = running.submit(plan(range(40), max_tokens=5))
    await asyncio.to_thread(within.wait, WAIT_S)
    running.engine.cancel(row)
    go.set()
    await until(lambda: running.engine.pending == 0)
    assert (client.events, stream.progress) == ([], begun)
    assert (running.engine.counters.cancelled, running.engine.counters.errors) == (1, 0)
    await until(lambda: running.engine.counters.kv_used_bytes == 0)
    stream.within = lambda _: None
    assert (await running.ask(plan(range(50), max_tokens=5))).events == expected.events
    assert "Traceback" not in capfd.readouterr().err


async def test_a_client_that_leaves_while_its_answer_is_made_ends_the_pass_too(
    start: Start, stream: Scripted
) -> None:
    running = await started(start, stream)
    within, go = threading.Event(), threading.Event()

    def wait(shape: tuple[int, int]) -> None:
        if shape == (1, 1) and stream.progress > 3:
            within.set()
            assert go.wait(WAIT_S)

    stream.within = wait
    _, row = running.submit(plan(range(20), max_tokens=500))
    await asyncio.to_thread(within.wait, WAIT_S)
    passes = stream.progress
    running.engine.cancel(row)
    go.set()
    await until(lambda: running.engine.pending == 0)
    assert stream.progress == passes
    stream.within = lambda _: None
    assert (await running.ask(plan(range(20), max_tokens=2))).events[-1] == Finish("length")


async def test_a_pass_goes_on_while_one_of_those_that_wait_for_it_is_left(
    start: Start, stream: Scripted
) -> None:
    running = await start(batch=2, stream=stream)
    running.model.before = stream.layer
    within, go = threading.Event(), threading.Event()

    def wait(shape: tuple[int, int]) -> None:
        within.set()
        assert go.wait(WAIT_S)

    stream.within = wait
    prompt = plan(range(40), max_tokens=4)
    (_, leaves), (stays, other) = running.row(prompt), running.row(prompt)
    running.engine.submit_all([leaves, other])
    await asyncio.to_thread(within.wait, WAIT_S)
    running.engine.cancel(leaves)
    go.set()
    await asyncio.wait_for(stays.ended.wait(), WAIT_S)
    assert stays.events[-1] == Finish("length")


@pytest.mark.parametrize("when", [(1, 16), (1, 1)])
async def test_an_expert_that_cannot_be_read_ends_that_request_and_no_other(
    start: Start, stream: Scripted, when: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    running = await started(start, stream)
    expected = await running.ask(plan(range(40), max_tokens=5))

    def broken(shape: tuple[int, int]) -> None:
        if shape == when:
            raise ReadFault(3, 7, "model-00002.safetensors", "Input/output error")

    for _ in range(3):
        stream.within = broken
        failed = await running.ask(plan(range(20), max_tokens=5))
        (failure,) = failed.events
        assert isinstance(failure, Failure)
        assert failure.error.status == 500
        assert "layer 3, expert 7" in failure.error.message
        assert "model-00002.safetensors" in failure.error.message
        stream.within = lambda _: None
        assert (await running.ask(plan(range(40), max_tokens=5))).events == expected.events
    assert running.engine.counters.errors == 3
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("passes", [1, 2, 3, 5])
async def test_nothing_is_told_or_kept_of_weights_that_were_overwritten(
    start: Start, stream: Scripted, passes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    running = await started(start, stream, cache=CacheLaunch(1 << 26))

    def overwrite(_shape: tuple[int, int]) -> None:
        if stream.progress == passes - 1:
            stream.file = "model-00002.safetensors"

    free = await (await started(start, Scripted())).ask(plan(range(20), max_tokens=5))
    stream.within = overwrite
    failed = await running.ask(plan(range(20), max_tokens=5))
    again = await running.ask(plan(range(40), max_tokens=5))
    for client in (failed, again):
        failure = client.events[-1]
        assert isinstance(failure, Failure)
        assert failure.error.status == 500
        assert "model-00002.safetensors was overwritten" in failure.error.message
        assert "reload the model" in failure.error.message
    # Two passes are the prompt's. The second request ran none.
    assert (failed.text, again.text) == (free.text[: max(0, passes - 3)], "")
    assert stream.progress == passes
    assert running.engine.cache is not None
    reach = running.engine.cache.reach
    prompt = np.arange(20, dtype=np.uint32)
    kept = await running.engine.call(lambda: reach(prompt, plan(range(20), max_tokens=5).namespace))
    assert kept == (0, 0, 19, 19)[min(passes, 4) - 1]
    assert "Traceback" not in capfd.readouterr().err


async def test_an_engine_that_stops_gives_up_the_pass_it_is_in(start: Start, stream: Scripted) -> None:
    running = await started(start, stream)
    within, go = threading.Event(), threading.Event()

    def wait(shape: tuple[int, int]) -> None:
        within.set()
        assert go.wait(WAIT_S)

    stream.within = wait
    running.submit(plan(range(20), max_tokens=500))
    await asyncio.to_thread(within.wait, WAIT_S)
    running.engine.stop()
    go.set()
    await until(lambda: not running.engine._thread.is_alive())
    assert stream.progress == 0


async def test_progress_moves_within_a_pass(start: Start, stream: Scripted) -> None:
    running = await started(start, stream)
    seen: list[int] = []

    def layers(_shape: tuple[int, int]) -> None:
        seen.append(running.engine.progress)
        stream.progress += 75
        seen.append(running.engine.progress)

    stream.within = layers
    await running.ask(plan(range(3), max_tokens=1))
    assert seen[1] == seen[0] + 75


async def test_what_was_read_for_a_request_is_told_with_it(start: Start, stream: Scripted) -> None:
    running = await started(start, stream)
    client, row = running.submit(plan(range(40), max_tokens=5))
    await client.ended.wait()
    # Three chunks and five steps, four misses of ten bytes each.
    assert row.turn is not None
    assert (row.turn.hits, row.turn.misses, row.turn.read_bytes, row.turn.wait_s) == (96, 32, 320, 4.0)
    assert (row.turn.prompt_tokens, row.turn.tokens, row.turn.hit_rate) == (40, 5, 0.75)
    assert 0 < row.turn.prefill_s <= row.turn.ttft_s
    assert row.turn.tokens_per_s > 0
    assert running.engine.streamed is not None
    assert running.engine.streamed.last_turn == row.turn
    await until(lambda: stream.turns == 1)


async def test_a_prefix_from_the_cache_goes_on_in_one_chunk_where_that_is_enough(
    start: Start, stream: Scripted
) -> None:
    running = await started(start, stream, width=512, cache=CacheLaunch(1 << 26))
    prompt = [place * 7 % 256 for place in range(500)]
    await running.ask(plan(prompt, max_tokens=1))
    running.model.shapes.clear()
    again = await running.ask(plan([*prompt, *range(100)], max_tokens=1))
    assert again.usage.cached_tokens >= 499
    # On the grid there would be a cut at 512.
    assert running.model.shapes == [(1, 599 - again.usage.cached_tokens), (1, 1)]


async def test_what_is_kept_of_an_answer_is_what_its_caches_hold(start: Start, stream: Scripted) -> None:
    running = await started(start, stream, width=512, cache=CacheLaunch(1 << 26))
    prompt = [place * 7 % 256 for place in range(300)]
    client, row = running.submit(plan(prompt, max_tokens=9))
    await client.ended.wait()
    again = await running.ask(plan([*row.ids, 1, 2, 3], max_tokens=4))
    # The last token was told and never went through the model.
    assert again.usage.cached_tokens == len(row.ids) - 1
    fresh = await (await started(start, Scripted())).ask(plan([*row.ids, 1, 2, 3], max_tokens=4))
    assert again.text == fresh.text


def test_flat_chunks_are_counted_from_where_a_prompt_goes_on() -> None:
    flat, grid = ChunkWidth("cpu", 2048, flat=True), ChunkWidth("cpu", 2048)
    for start, last, ends, cuts in (
        (0, 5000, 2048, 2048),
        (1900, 2200, 2200, 2048),
        (1900, 9000, 3948, 2048),
    ):
        assert (flat.end(start, last), grid.end(start, last)) == (ends, cuts)


async def test_a_streamed_model_takes_no_adapter(tmp_path: Path) -> None:
    unasked: Any = None
    adapters = Adapters(unasked, list, AdaptersLaunch(str(tmp_path)), 0, STREAMED_REFUSAL)
    assert await adapters.of(None) is None
    for asking in (adapters.of("tone"), adapters.mount("tone", None)):
        with pytest.raises(ApiError, match="streamed from disk") as refused:
            await asking
        assert refused.value.status == 400


def streamed_at(stream: Scripted, available: list[int], clock: list[float]) -> Streamed:
    return Streamed(stream, lambda: False, lambda: available[0], lambda: clock[0])


def test_slots_give_way_to_memory_and_come_back(stream: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.worker.engine.streamed.floor_bytes", lambda _: 10_000)
    available, clock = [50_000], [0.0]
    streamed = streamed_at(stream, available, clock)

    def look(at_s: float, bytes_now: int, held: bool = False) -> int:
        clock[0], available[0] = at_s, bytes_now
        streamed.between_passes(held)
        return stream.slots

    assert look(2, 7_500) == 5
    assert look(2.5, 1_000) == 5, "a reading is trusted for a moment"
    assert look(6, 0) == 1, "one slot per layer stays"
    assert look(10, 0) == 1
    assert look(20, 14_500) == 1
    assert look(39, 14_500) == 1, "not at once"
    assert look(41, 14_500, held=True) == 1, "not while the GPU is somebody else's"
    assert look(70, 14_500) == 1
    assert look(91, 14_500) == 4
    assert look(95, 90_000) == 4
    assert look(116, 90_000) == 8, "never above the plan"
    assert msgspec.to_builtins(streamed.pressure) == {"given_back": 7, "taken_again": 7}


def test_slots_in_a_devices_own_memory_do_not_give_way_to_the_machines(
    stream: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxpool.worker.engine.streamed.floor_bytes", lambda _: 10_000)
    stream.slot_bytes = 0
    clock = [0.0]
    streamed = streamed_at(stream, [0], clock)
    for at_s in (2.0, 6.0, 10.0):
        clock[0] = at_s
        streamed.between_passes(held=False)
    assert (stream.slots, streamed.pressure.given_back) == (8, 0)


def test_the_rate_of_a_turn_leaves_its_prefill_out() -> None:
    row = Row(plan(range(4)), AnswerText(ByteDetokeniser(token_bytes)), Client().put)
    assert turn(row, ExpertSummary(), ExpertSummary(), 5.0).tokens_per_s == 0.0
    row.admitted_s, row.prefilled_s, row.first_s, row.emitted = 1.0, 3.0, 4.0, 11
    told = turn(row, ExpertSummary(), ExpertSummary(), 9.0)
    assert (told.prefill_s, told.ttft_s, told.tokens_per_s) == (2.0, 3.0, 2.0)
