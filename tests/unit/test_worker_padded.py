"""Short prompts that wait together are prefilled in one pass, and no row of it can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlxpool.worker.engine import padded
from mlxpool.worker.engine.row import Row
from mlxpool.worker.load import load
from mlxpool.worker.request.plan import Plan
from mlxpool.worker.text.events import Failure, Finish
from tests.tools import rowless_models, tiny_models
from tests.tools.engine_fixture import Start
from tests.tools.running_engine import Client, Running, plan, until
from tests.tools.tiny_fixture import TinyModels

# Inside the sliding model's window; two of a length, and one that has nothing to prefill.
LENGTHS = (30, 17, 25, 12, 1, 25, 31, 20)


def plans(**settings: Any) -> list[Plan]:
    return [
        plan(
            [(place * 7 + number * 11) % 250 for place in range(length)],
            max_tokens=40,
            seed=number,
            **settings,
        )
        for number, length in enumerate(LENGTHS)
    ]


async def together(running: Running, asked: list[Plan]) -> list[tuple[Client, Row]]:
    rows = [running.row(of) for of in asked]
    running.engine.submit_all([row for _, row in rows])
    for client, _ in rows:
        await client.ended.wait()
    return rows


def passes(running: Running, since: int) -> list[tuple[int, int]]:
    """Shapes of the prefill's forward passes, without those of the checks what rows may share."""
    return [(rows, width) for rows, width in running.model.shapes[since:] if width > 12 or rows > 8]


@pytest.mark.parametrize("kind", ["llama", "sliding"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_eight_short_prompts_at_once_take_one_pass_and_answer_as_alone(
    start: Start, kind: tiny_models.Kind, temperature: float
) -> None:
    running = await start(kind, batch=8, width=256)
    asked = plans(temperature=temperature)
    alone = [await running.ask(of) for of in asked]
    before = len(running.model.shapes)
    rows = await together(running, asked)
    assert [client.events[-2:] for client, _ in rows] == [client.events[-2:] for client in alone]
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert passes(running, before) == [(7, 30)]


async def test_prompts_share_as_many_passes_as_their_chunk_is_narrow(start: Start) -> None:
    running = await start(batch=8, width=64)
    asked = plans()
    alone = [await running.ask(of) for of in asked]
    before = len(running.model.shapes)
    rows = await together(running, asked)
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    shapes = passes(running, before)
    assert all(rows * width <= 64 for rows, width in shapes)
    assert len(shapes) < 5


async def test_a_prompt_past_the_window_of_a_sliding_layer_goes_alone(start: Start) -> None:
    running = await start("sliding", batch=8, width=256)
    asked = [plan([(place * 7 + number) % 250 for place in range(50)]) for number in range(3)]
    alone = [await running.ask(of) for of in asked]
    before = len(running.model.shapes)
    rows = await together(running, asked)
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert passes(running, before) == [(1, 49)] * 3


async def test_after_a_shared_pass_that_fails_each_prompt_goes_alone(start: Start) -> None:
    running = await start(batch=8, width=256)
    asked = plans()
    alone = [await running.ask(of) for of in asked]
    before = len(running.model.shapes)
    running.model.fail_when = lambda shape: shape == (7, 30)
    rows = await together(running, asked)
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert sorted(passes(running, before)) == [(1, 16), (1, 19), (1, 24), (1, 24), (1, 29), (1, 30), (7, 30)]
    assert (running.engine.pending, running.engine.counters.errors) == (0, 0)


async def test_a_prompt_that_fails_alone_as_well_ends_its_own_row(start: Start) -> None:
    running = await start(batch=8, width=256)
    asked = plans()
    alone = [await running.ask(of) for of in asked]

    def second(shape: tuple[int, int]) -> bool:
        if shape == (7, 30):
            running.model.fail_when = lambda shape: shape == (1, 16)
            raise RuntimeError("out of something")
        return False

    running.model.fail_when = second
    rows = await together(running, asked)
    failed = [number for number, (client, _) in enumerate(rows) if isinstance(client.events[-1], Failure)]
    assert [LENGTHS[number] for number in failed] == [17]
    others = [number for number in range(len(rows)) if number not in failed]
    assert [rows[number][0].text for number in others] == [alone[number].text for number in others]


async def test_a_row_that_leaves_during_the_shared_pass_changes_nothing_for_the_others(start: Start) -> None:
    running = await start(batch=8, width=256)
    asked = plans()
    alone = [await running.ask(of) for of in asked]
    rows = [running.row(of) for of in asked]

    def leave(shape: tuple[int, int]) -> bool:
        if shape == (7, 30):
            running.engine.cancel(rows[2][1])
        return False

    running.model.fail_when = leave
    running.engine.submit_all([row for _, row in rows])
    stayed = [number for number in range(len(rows)) if number != 2]
    for number in stayed:
        await rows[number][0].ended.wait()
    assert [rows[number][0].text for number in stayed] == [alone[number].text for number in stayed]
    assert rows[2][0].events == []
    assert (running.engine.pending, running.engine.counters.cancelled) == (0, 1)


async def test_a_long_prompt_on_its_way_takes_no_part(start: Start) -> None:
    running = await start(batch=8, width=64)
    long = plan([place % 250 for place in range(600)], max_tokens=10)
    asked = [plan([place * 3 % 250 + number for place in range(15)], max_tokens=10) for number in range(4)]
    alone = [await running.ask(of) for of in (long, *asked)]
    before = len(running.model.shapes)
    rows = await together(running, [long, *asked])
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert (4, 14) in passes(running, before)
    assert all(client.events[-1] == Finish("length") for client, _ in rows)


def test_only_caches_that_are_keys_and_values_by_position_take_part() -> None:
    class Derived(KVCache):  # type: ignore[misc]
        pass

    assert padded.longest([KVCache(), KVCache()]) > 1 << 40
    assert padded.longest([KVCache(), RotatingKVCache(32), RotatingKVCache(64, keep=4)]) == 32
    for other in (ArraysCache(2), QuantizedKVCache(), ChunkedKVCache(16), CacheList(KVCache()), Derived()):
        assert padded.longest([KVCache(), other]) == 0


# Rows of these two can't decode together.
@pytest.mark.parametrize("make", rowless_models.MAKERS.values(), ids=rowless_models.MAKERS)
def test_models_whose_masks_know_no_rows_prefill_together_all_the_same(make: Callable[[], Any]) -> None:
    mx.random.seed(3)
    model = make()
    prompts = [[(place * 7 + length) % 256 for place in range(length)] for length in (5, 1, 9)]
    rows = padded.prefill(model, make_prompt_cache(model), prompts)
    for prompt, caches in zip(prompts, rows, strict=True):
        alone = make_prompt_cache(model)
        model(mx.array([prompt]), cache=alone)
        one, two = (model(mx.array([[3]]), cache=held) for held in (alone, caches))
        assert mx.allclose(one, two, atol=1e-5)
        assert [held.offset for held in caches] == [len(prompt) + 1] * len(caches)
    assert padded.works(model, lambda: make_prompt_cache(model))


def test_a_model_whose_rows_see_each_other_is_found_out(tiny: TinyModels) -> None:
    loaded = load(tiny("llama"), lambda _done, _total: None)

    def mixed(tokens: mx.array, cache: Any) -> Any:
        return loaded.model(mx.broadcast_to(tokens[:1], tokens.shape), cache=cache)

    assert padded.works(loaded.model, loaded.make_cache)
    assert not padded.works(mixed, loaded.make_cache)


async def test_short_prompts_that_came_together_decode_together_from_the_first_step(start: Start) -> None:
    running = await start(batch=8, width=40)
    asked = [plan([place * 3 % 250 + number for place in range(31)], max_tokens=10) for number in range(6)]
    alone = [await running.ask(of) for of in asked]
    # The check whether rows can share a pass is made with the first two.
    await together(running, asked[:2])
    before = len(running.model.shapes)
    rows = await together(running, asked)
    assert [client.text for client, _ in rows] == [client.text for client in alone]
    assert running.model.shapes[before:] == [(1, 30)] * 6 + [(6, 1)] * 10


async def test_a_stream_that_has_begun_waits_for_one_chunk_of_tokens_and_no_longer(start: Start) -> None:
    running = await start(batch=8, width=64)
    stream, _ = running.submit(plan(range(20), max_tokens=100_000, temperature=1.0))
    await until(lambda: len(stream.events) > 3)
    asked = [plan([place * 3 % 250 + number for place in range(31)], max_tokens=5) for number in range(6)]
    await together(running, asked[:2])
    before = len(running.model.shapes)
    await together(running, asked)
    between = 0
    for rows, width in running.model.shapes[before:]:
        between = 0 if width == 1 else between + rows * width
        assert between <= 64
